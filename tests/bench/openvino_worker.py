"""Runs OpenVINO GenAI's continuous batching, without a server, for peers.py. Needs only the package openvino-genai.

    python openvino_worker.py MODEL [PROPERTIES-AS-JSON]

Reads one JSON object a line from stdin: {"prompts": [text, …], "max_tokens": 64, "streams": 16}, and answers each with
{"duration_s", "num_tokens", "ttfts_s"} on a line of its own; the first line of all is {"load_s", "version"}.
"""

import json
import os
import sys
import time
from typing import Any

import openvino_genai

CACHE_GIB = 2
MAX_BATCHED_TOKENS = 512


def load(path: str, properties: dict[str, Any]) -> openvino_genai.ContinuousBatchingPipeline:
    config = openvino_genai.SchedulerConfig()
    config.cache_size = CACHE_GIB
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.enable_prefix_caching = False
    return openvino_genai.ContinuousBatchingPipeline(path, config, "CPU", properties)


def run(pipeline: openvino_genai.ContinuousBatchingPipeline, job: dict[str, Any]) -> dict[str, Any]:
    """Keep `streams` requests running until all prompts are answered; a request's clock starts when it is added."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = job["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    waiting, open_ones, ttfts_s, num_tokens = list(enumerate(job["prompts"])), [], [], 0
    began_s = time.perf_counter()
    while waiting or open_ones:
        while waiting and len(open_ones) < job["streams"]:
            number, prompt = waiting.pop(0)
            open_ones.append([pipeline.add_request(number, prompt, config), time.perf_counter(), 0])
        pipeline.step()
        now_s = time.perf_counter()
        for request in open_ones:
            handle, started_s, seen = request
            while handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                if not seen and count:
                    ttfts_s.append(now_s - started_s)
                seen += count
            request[2] = seen
        ended = [r for r in open_ones if r[0].get_status() != openvino_genai.GenerationStatus.RUNNING]
        num_tokens += sum(request[2] for request in ended)
        open_ones = [request for request in open_ones if request not in ended]
    return {"duration_s": time.perf_counter() - began_s, "num_tokens": num_tokens, "ttfts_s": ttfts_s}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints must not get between the answers
    began_s = time.perf_counter()
    pipeline = load(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    print(json.dumps({"load_s": time.perf_counter() - began_s, "version": openvino_genai.__version__}), file=answers)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
