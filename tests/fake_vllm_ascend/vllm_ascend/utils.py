from functools import cache


@cache
def enable_dsa_cp() -> bool:
    from vllm.config import get_current_vllm_config

    return bool(get_current_vllm_config().additional_config.get("enable_dsa_cp"))
