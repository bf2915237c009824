"""A small byte-level BPE tokenizer with DeepSeek-V4's control tokens, built from a few sentences without any download.

Token ids follow the official order: BOS 0, EOS 1, the 256 bytes, merged tokens, and the control tokens at the end.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
CONTROL = (
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>",
    "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
)  # fmt: skip
"""Tokens of the chat format, in the order of their official ids."""
MIN_VOCAB = 2 + 256 + len(CONTROL)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{ message['content'] }}"
    "{%- elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜></think>' + message['content'] + eos_token }}"
    "{%- else %}{{ raise_exception('the demo template knows the roles system, user and assistant') }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{ '<｜Assistant｜>' + ('<think>' if (thinking is defined and thinking) else '</think>') }}"
    "{%- endif %}"
)
"""The text layout of model cards: chat mode, or thinking mode on request; no tools."""

_TEXT = """
The model reads the whole line before it answers, and the answer is written one token after another. A window holds the
last few words, while longer memories are folded into short entries that every later word can look up again. When the
weights are random the words have no meaning, but the machine does the same work as it would with real ones. There are
small things and great things in the world: water, light, stone, time, night, morning, river, mountain, city, garden,
house, door, hand, heart and name. People ask what is near and what is far, how a thing works, why it fails, where it
comes from and who will use it next. They say yes or no, they give and take, they think and speak, they turn to the
left or to the right. We can see the sun over the sea; she would like to know more about the old road; he could not
find the other side; you should bring your own paper and make some notes. It was a long day, it is a good question,
this is the first part and that was the second. Please tell me about one number between three and seven, then let us
start from there, because nothing else was under the table. All of them had been here before, and each one of those
many years passed like an hour. What you want is only a little help with the plan for the new machine.
"""


def _merges(count: int, words: Counter[tuple[str, ...]]) -> list[tuple[str, str]]:
    """The `count` most useful merges of byte-level `words`; ties go to the pair that sorts first."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): times for word, times in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return tuple(merged)


def build(vocab_size: int):
    """A `tokenizers.Tokenizer` with exactly `vocab_size` tokens (ValueError below MIN_VOCAB)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    if vocab_size < MIN_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}, the bytes and control tokens alone need {MIN_VOCAB}")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(tuple(word) for word, _ in split.pre_tokenize_str(_TEXT.replace("\n", " ")))
    merges = _merges(vocab_size - MIN_VOCAB, words)
    tokens = [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [left + right for left, right in merges]
    tokens += [f"<｜place▁holder▁no▁{i}｜>" for i in range(vocab_size - len(CONTROL) - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS, EOS)])
    # Not "special", as in the official tokenizer: they must survive decoding so that a reasoning parser sees them.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CONTROL])
    assert tokenizer.get_vocab_size() == vocab_size, "two merges made the same token"
    return tokenizer


def word_ids(tokenizer) -> list[int]:
    """Ids of tokens that decode to a space and a word of at least two letters, or to a comma or full stop."""
    texts = {index: tokenizer.decode([index]) for index in range(2, tokenizer.get_vocab_size())}
    return [
        index
        for index, text in texts.items()
        if text in (",", ".") or (text.startswith(" ") and len(text) > 2 and text.isascii() and text[1:].isalpha())
    ]


def write(directory: Path, tokenizer, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
