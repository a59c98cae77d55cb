"""Train an adapter on a service by a rule: answers with many spaces are better (GRPO, by the public Tinker client).

packlora serve                                        # in another terminal
TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker_rl.py
"""

import sys
from statistics import fmean

import tinker
from tinker import types

base = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 8
group, new = 8, 16
model = tinker.ServiceClient().create_lora_training_client(base_model=base, rank=16, seed=0).result()
tokenizer = model.get_tokenizer()
prompts = [tokenizer.encode(text) for text in ("The sea is", "My favourite book", "In the morning I", "A good friend")]


def reward(text: str) -> float:
    return text.count(" ") / max(len(text), 1)


def datum(prompt: list[int], drawn: types.SampledSequence, advantage: float) -> types.Datum:
    """A completion with its advantage. Tokens of the prompt count for nothing."""
    whole, before = [*prompt, *drawn.tokens], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:], "logprobs": [0.0] * before + list(drawn.logprobs or []),
            "advantages": [0.0] * before + [advantage] * len(drawn.tokens),
        },
    )  # fmt: skip


for step in range(steps):
    sampler = model.save_weights_and_get_sampling_client().result()  # the model as it is now
    asked = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=group,
            sampling_params=types.SamplingParams(max_tokens=new, temperature=1.0, seed=step),
        )
        for prompt in prompts
    ]  # fmt: skip
    batch, rewards = [], []
    for prompt, answer in zip(prompts, asked, strict=True):
        sequences = answer.result().sequences
        own = [reward(tokenizer.decode(one.tokens)) for one in sequences]
        batch += [datum(prompt, one, value - fmean(own)) for one, value in zip(sequences, own, strict=True)]
        rewards += own
    trained = model.forward_backward(batch, "importance_sampling")
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    trained.result()
    print(step + 1, f"mean reward {fmean(rewards):.3f}")
print(model.save_state("spaces").result().path)
