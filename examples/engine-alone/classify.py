"""The engine without the job runner: token ids in, token ids out, in the order that shares most.

Run from the repository root, after `make demo` has fetched the model:

    .venv/bin/python examples/engine-alone/classify.py
"""

from pathlib import Path

from batchgen.engine import Engine, Request, Sampling

MODEL = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = """\
Say whether a Python function works on text, numbers, files or processes.

textwrap.dedent -> text
math.gcd -> numbers
shutil.copyfile -> files
os.waitpid -> processes
"""
NAMES = ["str.upper", "statistics.mean", "os.remove", "subprocess.run", "re.sub", "math.sqrt", "open", "os.kill"]


def main() -> None:
    engine = Engine.load(str(MODEL), device="cpu")
    prompts = engine.tokenizer.encode([f"{EXAMPLES}{name} ->" for name in NAMES], add_special_tokens=True)
    sampling = Sampling(max_tokens=6, temperature=0, stop=("\n",), logprobs=0)
    requests = [Request(key, prompt, sampling) for key, prompt in enumerate(prompts)]
    for completion in engine.run(requests):
        answer = engine.tokenizer.decode(completion.tokens).strip()
        certainty = completion.logprobs[0].logprob
        print(f"{NAMES[completion.key]:16} {answer:10} log-probability {certainty:6.2f}  {completion.usage}")
    statistics = engine.statistics
    print(f"prompt tokens computed {statistics.computed_prompt_tokens}, cached {statistics.cached_prompt_tokens}")


if __name__ == "__main__":
    main()
