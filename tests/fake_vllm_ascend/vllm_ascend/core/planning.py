"""Groups, pages and tensors of caches: a group for every block size, c4 and c128 first, pages as large as of c4."""

from collections import defaultdict
from typing import Any

import vllm.v1.core.kv_cache_coordinator as coordinator
import vllm.v1.core.kv_cache_manager as manager
import vllm.v1.core.kv_cache_utils as planning
import vllm.v1.engine.core as engine
from vllm.v1.core.kv_cache_utils import may_override_num_blocks
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)


def group_and_unify_kv_cache_specs(kv_cache_spec: dict[str, Any]) -> list[UniformTypeKVCacheSpecs]:
    full: dict[int, dict[str, Any]] = defaultdict(dict)
    sliding: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, spec in kv_cache_spec.items():
        assert isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec))
        (sliding if isinstance(spec, SlidingWindowMLASpec) else full)[spec.block_size][name] = spec
    found = [*(full[size] for size in sorted(full)), *sliding.values()]
    return [UniformTypeKVCacheSpecs.from_specs(specs) for specs in found]


def _get_kv_cache_groups_uniform_groups(grouped: list[UniformTypeKVCacheSpecs]) -> list[KVCacheGroupSpec]:
    c4, c128, *others = grouped
    assert all(isinstance(spec, MLAAttentionSpec) for full in (c4, c128) for spec in full.kv_cache_specs.values())
    groups = [KVCacheGroupSpec(list(full.kv_cache_specs), full) for full in (c4, c128)]
    most = c4.get_num_layer_tuples()
    for specs in others:
        by_size: dict[int, list[str]] = defaultdict(list)
        for name, spec in specs.kv_cache_specs.items():
            size = min(size for size in c4.get_page_sizes() if size >= spec.page_size_bytes)
            if spec.page_size_bytes < size:
                object.__setattr__(spec, "page_size_padded", size)
            by_size[size].append(name)
        assert len({len(names) for names in by_size.values()}) == 1
        tuples = list(zip(*by_size.values(), strict=True))
        parts = -(-len(tuples) // most)
        for part in range(parts):
            names = [name for names in tuples[part::parts] for name in names]
            spec = UniformTypeKVCacheSpecs.from_specs({name: specs.kv_cache_specs[name] for name in names})
            groups.append(KVCacheGroupSpec(names, spec))
    return groups


def _get_kv_cache_config_packed(
    vllm_config: Any, kv_cache_groups: list[KVCacheGroupSpec], available_memory: int
) -> tuple[int, list[KVCacheTensor]]:
    """Tensors of whole pages, each shared by one cache of every group; those of the MTP block share none."""
    sizes = sorted(kv_cache_groups[0].kv_cache_spec.get_page_sizes())
    slots: dict[tuple[int, int], list[str]] = {}
    alone: dict[str, int] = {}
    for group in kv_cache_groups:
        count: dict[int, int] = defaultdict(int)
        for name in group.layer_names:
            size = group.kv_cache_spec.kv_cache_specs[name].page_size_bytes
            if "mtp" in name:
                alone[name] = size
                continue
            slots.setdefault((count[size], size), []).append(name)
            count[size] += 1
    rounds = max(index for index, _ in slots) + 1 + len(alone)
    blocks = may_override_num_blocks(vllm_config, available_memory // (sum(sizes) * rounds))
    tensors = [KVCacheTensor(size=size * blocks, shared_by=names) for (_, size), names in slots.items()]
    return blocks, tensors + [KVCacheTensor(size=size * blocks, shared_by=[name]) for name, size in alone.items()]


_resolve = planning.resolve_kv_cache_block_sizes
_coordinator = coordinator.get_kv_cache_coordinator


def resolve_kv_cache_block_sizes(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
    return _resolve(kv_cache_config, vllm_config)


def get_kv_cache_coordinator(*arguments: Any, **named: Any) -> Any:
    return _coordinator(*arguments, **named)


planning.resolve_kv_cache_block_sizes = engine.resolve_kv_cache_block_sizes = resolve_kv_cache_block_sizes
coordinator.get_kv_cache_coordinator = manager.get_kv_cache_coordinator = get_kv_cache_coordinator
planning._get_kv_cache_groups_uniform_groups = _get_kv_cache_groups_uniform_groups
planning._get_kv_cache_config_packed = _get_kv_cache_config_packed
planning.group_and_unify_kv_cache_specs = group_and_unify_kv_cache_specs
