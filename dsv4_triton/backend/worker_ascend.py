"""vllm-ascend's worker with this project's check of it and its warm-up."""

from __future__ import annotations

from typing import Any

from vllm_ascend.worker.worker import NPUWorker

from dsv4_triton.backend import capture_rules
from dsv4_triton.backend.ascend_contract import check_runner
from dsv4_triton.backend.metadata import idle_steps
from dsv4_triton.backend.serving import Serving


class AscendWorker(NPUWorker):
    def init_device(self) -> None:
        capture_rules.check()
        # Only here: later vLLM has its own block size in the config.
        self.warm_up = Serving.of(self.vllm_config).options.warm_up == "on"
        super().init_device()
        check_runner(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """Compile every kernel first: a capture can compile none, so graphs need it whatever is asked for."""
        if self.warm_up or not self.model_config.enforce_eager:
            self.model_runner.model.warm_up(self.model_runner)
        with idle_steps(), capture_rules.enforced(self.device):
            return super().compile_or_warm_up_model()

    def execute_dummy_batch(self) -> None:
        """A step of a data-parallel rank that has no request."""
        with idle_steps():
            super().execute_dummy_batch()
