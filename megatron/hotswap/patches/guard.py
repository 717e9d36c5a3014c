"""Refuses a Megatron that the patches were not written for.

A patch replaces a function whose behaviour it knows. If the function's source is another one, nobody has read what the patch
would now do, so training does not start. `python -m megatron.hotswap.patches.guard` prints the table of the installed version.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect

from ..errors import UsageError

SUPPORTED = ("0.19.2",)

#: module:function -> first 16 hex digits of the SHA-256 of its source in the supported version.
KNOWN = {
    "megatron.training.training:pretrain": "538adc5ffb179ad5",
    "megatron.training.training:setup_model_and_optimizer": "3d67da87effab5cb",
    "megatron.training.training:build_train_valid_test_data_iterators": "d12ed278f953cc10",
    "megatron.training.training:train_step": "68989d425b2300aa",
    "megatron.training.training:train": "3c2299658ae7928b",
    "megatron.training.training:training_log": "5e34a182d566e325",
    "megatron.training.training:evaluate": "a8be7269bc278373",
    "megatron.training.training:evaluate_and_print_results": "699dfbe69cf22ec4",
    "megatron.training.training:save_checkpoint_and_time": "f72b7873e1709b5e",
    "megatron.training.training:checkpoint_and_decide_exit": "a581d0350f89e3d5",
    "megatron.training.training:post_training_step_callbacks": "a9a0370634ac61fe",
    "megatron.training.training:enable_forward_pre_hook": "e19d58ff0dfe6cfe",
    "megatron.training.training:disable_forward_pre_hook": "4defb19dbfd51cca",
    "megatron.training.training:print_datetime": "2134ead899ac1bfc",
    "megatron.training.arguments:add_megatron_arguments": "580b80fbe5867b22",
    "megatron.training.arguments:parse_args": "9ae61a4f954f0a0d",
    "megatron.training.checkpointing:load_checkpoint": "4f03d48a79382b8c",
    "megatron.training.async_utils:_get_async_calls_queue": "24b06bbc62622dac",
    "megatron.training.async_utils:init_persistent_async_worker": "ecf8aa39047dcc99",
    "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue": "8478b5fea3f87c68",
    "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller": "68df29ee0cec9a78",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue": "e395fb0e86a062e2",
    "megatron.training.initialize:_initialize_distributed": "eb2767aec5eacb8d",
    "megatron.core.parallel_state:create_group": "c63a8d09e4df84b5",
    "megatron.core.parallel_state:initialize_model_parallel": "6e1200b46fab6634",
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step": "c2b301e02ec29f4e",
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step": "c9adaf2e01df4ff8",
    "megatron.core.optimizer.optimizer:FP32Optimizer.step": "61f032bf26aee758",
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads": "34fc101b433f1515",
    "megatron.core.optimizer.optimizer:FP32Optimizer.step_with_ready_grads": "90ac3825f5932ab0",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads": "2350cce9dd8822dd",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params": "80e4f4d1fa99e747",
    "megatron.core.timers:Timer.start": "cc5fd40d3601c511",
    "megatron.core.timers:Timer.stop": "f5604bd9ad6fd397",
    "megatron.core.pipeline_parallel.schedules:backward_step": "435628e2479e62f2",
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": "36d18a1e17302e34",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync": "4f819373090bd530",
    "megatron.core.rerun_state_machine:RerunDataIterator": "b799c527f24d1588",
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step": "b2a8f75df6930c36",
}


def fingerprint(path: str) -> str:
    """Of the source of "module:qualified name", as installed; "" if there is no such thing."""
    module, name = path.split(":")
    target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        return ""
    return hashlib.sha256(inspect.getsource(target).encode()).hexdigest()[:16]


def require_known_megatron() -> None:
    """Check version and functions; call before any patch is applied.

    Raises:
        UsageError: names the version or the functions that differ.
    """
    version = importlib.metadata.version("megatron-core")
    if version not in SUPPORTED:
        raise UsageError(
            f"hot-swap patches megatron-core {', '.join(SUPPORTED)}; {version} is installed: install a supported one "
            f"(pip install megatron-core=={SUPPORTED[-1]}) or train without --hot-swap"
        )
    changed = [path for path, known in KNOWN.items() if fingerprint(path) != known]
    if changed:
        raise UsageError(
            f"megatron-core {version} is installed, but {', '.join(changed)} is not the code that the patches were written for: "
            "something else has changed it; install megatron-core anew, or load what changes it after hot-swap"
        )


if __name__ == "__main__":
    for known_path in KNOWN:
        print(f'    "{known_path}": "{fingerprint(known_path)}",')
