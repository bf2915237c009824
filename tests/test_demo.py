"""The demo checkpoint: loadable as it is, complete, reproducible, and never written over something else."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dsv4_triton.demo import serve
from dsv4_triton.demo import tokenizer as demo_tokenizer
from dsv4_triton.demo.checkpoint import MARKER, DemoError, DemoSettings, default_ratios, write_checkpoint

SMALL: dict[str, Any] = {"ratios": (0, 4, 128), "hash_layers": 1, "experts": 6, "hidden": 64, "intermediate": 32}
TINY = DemoSettings(ratios=(0,), hash_layers=0, mtp_layers=0, experts=6, hidden=64, intermediate=32)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  not a dict
    assert set(found) == set(index)
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    assert write_checkpoint(folder, DemoSettings(**SMALL))
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """The default demo in fp32, as transformers loads it."""
    # Not the Auto classes: once vLLM is imported they hand out its config class instead of transformers'.
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    folder = tmp_path_factory.mktemp("demo") / "fp32"
    write_checkpoint(folder, DemoSettings(dtype="float32"))
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        folder, config=DeepseekV4Config.from_pretrained(folder), dtype=torch.float32, output_loading_info=True
    )
    return folder, model.eval(), info


def test_transformers_loads_every_tensor(loaded: tuple[Path, Any, dict[str, Any]]) -> None:
    _, _, info = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[problem], f"{problem}: {info[problem]}"


def test_transformers_generates_readable_text(loaded: tuple[Path, Any, dict[str, Any]]) -> None:
    from transformers import PreTrainedTokenizerFast

    folder, model, _ = loaded
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    chat = [{"role": "user", "content": "Who are you?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Who are you?<｜Assistant｜></think>"
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(output)
    assert answer.isascii() and len(answer.split()) >= 6


def test_activations_stay_of_order_one(loaded: tuple[Path, Any, dict[str, Any]]) -> None:
    """Also past the windows and the first c128 entry; the logits must neither explode nor collapse."""
    _, model, _ = loaded
    tokens = torch.randint(2, 500, (1, 300))
    with torch.no_grad():
        result = model(tokens, output_hidden_states=True)
    for hidden in result.hidden_states:
        assert 0.3 < hidden.float().std() < 3
    assert 0.2 < result.logits.std() < 2


def test_official_names_and_dtypes(small: Path) -> None:
    found = tensors_of(small)
    config = json.loads((small / "config.json").read_text())
    assert config["compress_ratios"] == [0, 4, 128, 0]
    fp32 = ("attn_sink", "_fn", "_base", "_scale", ".ape", "gate.bias")
    for name, tensor in found.items():
        wanted = torch.float32 if name.endswith(fp32) else torch.bfloat16
        assert tensor.dtype == (torch.int64 if name.endswith("tid2eid") else wanted), name
        if tensor.is_floating_point():
            values = tensor.float()
            assert values.isfinite().all() and (values != values.round()).any(), f"{name} looks like a default"
    for layer, (compressor, indexer, hashed) in enumerate([(0, 0, 1), (1, 1, 0), (1, 0, 0)]):
        prefix = f"layers.{layer}"
        assert (f"{prefix}.attn.compressor.ape" in found) == bool(compressor)
        assert (f"{prefix}.attn.indexer.compressor.ape" in found) == bool(indexer)
        assert (f"{prefix}.ffn.gate.tid2eid" in found) == bool(hashed)
        assert (f"{prefix}.ffn.gate.bias" in found) != bool(hashed)
    table = found["layers.0.ffn.gate.tid2eid"]
    assert table.shape == (512, 6)
    assert (table.sort(dim=1).values == torch.arange(6)).all(), "each token has distinct, valid experts"
    for name in ("enorm.weight", "hnorm.weight", "norm.weight", "e_proj.weight", "h_proj.weight", "hc_head_fn"):
        assert f"mtp.0.{name}" in found


def test_same_settings_same_files(small: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_checkpoint(again, DemoSettings(**SMALL))
    files = sorted(file.name for file in small.iterdir())
    assert files == sorted(file.name for file in again.iterdir())
    for file in files:
        assert (small / file).read_bytes() == (again / file).read_bytes(), file


def test_seed_and_dtype(small: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "seed", DemoSettings(**SMALL, seed=1))
    write_checkpoint(tmp_path / "fp32", DemoSettings(**SMALL, dtype="float32"))
    base, seed, fp32 = tensors_of(small), tensors_of(tmp_path / "seed"), tensors_of(tmp_path / "fp32")
    for name, tensor in base.items():
        assert not torch.equal(tensor, seed[name]), name
        assert torch.equal(tensor, fp32[name].to(tensor.dtype)), name


def test_rewrites_only_what_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "demo"
    assert write_checkpoint(folder, TINY)
    assert not write_checkpoint(folder, TINY), "same settings: left as it is"
    (folder / MARKER).write_text("not json")
    assert write_checkpoint(folder, TINY)
    assert list(folder.parent.iterdir()) == [folder], "no temporary folder stays"

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert write_checkpoint(foreign, TINY), "an empty folder is taken"
    (foreign / MARKER).unlink()
    with pytest.raises(DemoError, match="is not empty and no demo checkpoint"):
        write_checkpoint(foreign, TINY)
    assert (foreign / "config.json").is_file()
    file = tmp_path / "file"
    file.write_text("keep")
    with pytest.raises(DemoError, match="is a file"):
        write_checkpoint(file, TINY)
    assert file.read_text() == "keep"


def test_failure_leaves_the_old_checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    before = {file.name: file.read_bytes() for file in small.iterdir()}
    monkeypatch.setattr(demo_tokenizer, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(small, DemoSettings(**SMALL, seed=5))
    assert {file.name: file.read_bytes() for file in small.iterdir()} == before
    assert list(small.parent.iterdir()) == [small]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ratios": (0, 8)}, r"ratios are \[0, 8\]"),
        ({"ratios": ()}, "ratios are"),
        ({"hash_layers": 7}, "hash_layers is 7, there are 6"),
        ({"heads": 6, "o_groups": 4}, "multiple of o_groups"),
        ({"experts": 4}, "exceeds experts"),
        ({"vocab": 100}, "vocab is 100"),
        ({"context": 1000}, "context is 1000"),
        ({"hidden": 0}, "hidden is 0"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
    ids=str,
)
def test_bad_settings(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DemoError, match=says):
        DemoSettings(**changes)


def test_default_ratios() -> None:
    assert [default_ratios(n) for n in (1, 2, 3, 4)] == [(0,), (0, 4), (0, 4, 128), (0, 4, 128, 0)]
    assert default_ratios(7) == (0, 4, 128, 4, 128, 4, 0)


@pytest.mark.parametrize("vocab", [demo_tokenizer.MIN_VOCAB, 512, 3000])
def test_tokenizer_round_trip(vocab: int) -> None:
    tokenizer = demo_tokenizer.build(vocab)
    assert tokenizer.get_vocab_size() == vocab
    assert tokenizer.token_to_id(demo_tokenizer.BOS) == 0 and tokenizer.token_to_id(demo_tokenizer.EOS) == 1
    for token in demo_tokenizer.CONTROL:
        assert len(tokenizer.encode(token, add_special_tokens=False).ids) == 1
    for text in ("The machine reads.", "naïve – 你好 🙂\n\ttabs", "a<think>b</think>c", "\x00\x7f"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text and max(ids) < vocab
    assert tokenizer.encode("Hi").ids[0] == 0


STAND_IN = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return status != "Z"


def test_server_stops_with_its_children(tmp_path: Path) -> None:
    """The process group ends, children that ignore their parent's end included."""
    port = serve.free_port()
    server = serve.Server([sys.executable, "-c", STAND_IN, str(port)], port=port, log=tmp_path / "log")
    try:
        while not server.ready():
            pass
        child = int(server.last_lines(50)[0].split()[1])
        assert alive(child)
    finally:
        server.stop()
    assert not alive(server.process.pid) and not alive(child)
    server.stop()


def test_server_that_ends_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = serve.Server(command, port=serve.free_port(), log=tmp_path / "log")
    server.process.wait()
    with pytest.raises(serve.ServerFailedError, match="ended with status 1"):
        server.ready()
    assert server.last_lines(1) == ["no such model"]
    server.stop()


def test_the_cause_of_an_end_is_the_first_exception(tmp_path: Path) -> None:
    log = "print('(Engine) ERROR ValueError: no room for 1024 tokens'); raise RuntimeError('engine did not start')"
    server = serve.Server([sys.executable, "-uc", log], port=serve.free_port(), log=tmp_path / "log")
    server.process.wait()
    with pytest.raises(serve.ServerFailedError, match=r"with status 1; ValueError: no room for 1024 tokens$"):
        server.ready()
    server.stop()


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_demo_command_ends_with_its_server(small: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A signal while the server starts: exit status 0, and neither a process nor a log folder stays."""
    pid = tmp_path / "pid"
    stand_in = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import sys; from pathlib import Path; from rich.console import Console; from dsv4_triton.demo import serve\n"
        f"serve.server_command = lambda *a, **k: [sys.executable, '-c', {stand_in!r}]\n"
        f"sys.exit(serve.run_demo(Path({str(small)!r}), dtype='bfloat16', port=0, smoke=False, console=Console()))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    while not (pid.exists() and pid.read_text()):
        assert run.poll() is None
    run.send_signal(number)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0 and "starting the server" in output and "server stopped" in output
    assert not alive(int(pid.read_text()))
    assert list(tmp_path.iterdir()) == [pid]


WRITING = """
import sys, time
from dsv4_triton import cli
from dsv4_triton.demo import checkpoint

def write_files(directory, settings):
    (directory / "half").write_text("a file")
    print("writing", flush=True)
    time.sleep(600)

checkpoint._write_files = write_files
cli.app(["demo", sys.argv[1], "--layers", "1", "--hash-layers", "0"])
"""


def writing(directory: Path) -> subprocess.Popen[str]:
    """A demo command that is writing its checkpoint."""
    run = subprocess.Popen([sys.executable, "-c", WRITING, str(directory)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and any("writing" in line for line in run.stdout)
    return run


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_writing_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    run = writing(tmp_path / "demo")
    run.send_signal(number)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 130 and "interrupted" in output
    assert not list(tmp_path.iterdir())


def test_the_run_after_a_killed_one_cleans_up(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    run = writing(directory)
    with pytest.raises(DemoError, match="another process is writing there"):
        write_checkpoint(directory, TINY)
    run.kill()
    run.communicate(timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == [".demo.unfinished"]
    assert write_checkpoint(directory, TINY)
    assert list(tmp_path.iterdir()) == [directory] and not (directory / "half").exists()


def test_an_interrupt_while_replacing_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "demo"
    write_checkpoint(directory, TINY)
    before = (directory / MARKER).read_text()
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(directory, dataclasses.replace(TINY, seed=1))
    assert list(tmp_path.iterdir()) == [directory] and (directory / MARKER).read_text() == before


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    """A run that was killed between the two renames."""
    directory, unfinished = tmp_path / "demo", tmp_path / ".demo.unfinished"
    write_checkpoint(directory, TINY)
    (unfinished / "new").mkdir(parents=True)
    directory.rename(unfinished / "old")
    assert not write_checkpoint(directory, TINY), "it is the one asked for"
    assert list(tmp_path.iterdir()) == [directory]


def test_what_others_keep_in_the_hidden_folder_stays(tmp_path: Path) -> None:
    foreign = tmp_path / ".demo.unfinished" / "notes"
    foreign.parent.mkdir()
    foreign.write_text("keep")
    assert write_checkpoint(tmp_path / "demo", TINY)
    assert foreign.read_text() == "keep"


def test_free_port_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", serve.free_port()))


def test_progress_of_a_start_is_what_vllm_tells_last() -> None:
    lines = [
        "(APIServer pid=7) INFO 11-30 14:02:11 [core.py:105] Initializing a V1 LLM engine (v0.27.1)",
        "(EngineCore pid=9) INFO 11-30 14:02:12 [importing.py:68] Triton not installed or not compatible",
        "(EngineCore pid=9) WARNING 11-30 14:02:13 [system_utils.py:5] Found ulimit of 1024, which may lead to errors",
        "Too many open files`. Consider increasing with ulimit -n",
    ]
    server = SimpleNamespace(last_lines=lambda count: lines)
    assert serve.Server.message(server) == "Initializing a V1 LLM engine (v0.27.1)"  # type: ignore[arg-type]
    lines = lines[1:]
    assert serve.Server.message(server) == ""  # type: ignore[arg-type]
