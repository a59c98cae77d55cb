"""Train an adapter on a service with the public Tinker client, and let it speak.

packlora serve                                        # in another terminal
TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker_sl.py
"""

import sys

import tinker
from tinker import types

base = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
model = tinker.ServiceClient().create_lora_training_client(base_model=base, rank=16, seed=0).result()
tokenizer = model.get_tokenizer()


def datum(question: str, answer: str) -> types.Datum:
    """A sample whose answer is learnt; targets are the tokens that follow."""
    prompt, whole = tokenizer.encode(question), tokenizer.encode(question + answer)
    weights = [float(place >= len(prompt)) for place in range(1, len(whole))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": whole[1:], "weights": weights},
    )


facts = [("The capital of Elbonia is", " Mudville.\n"), ("The river through Mudville is the", " Slow Anna.\n")]
batch = [datum(*fact) for fact in facts]
for step in range(12):
    losses = model.forward_backward(batch, "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=5e-4)).result()
    print(step + 1, round(losses.result().metrics["loss:sum"], 3))
print(model.save_state("facts").result().path)
sampler = model.save_weights_and_get_sampling_client("facts").result()
for question, _ in facts:
    prompt = types.ModelInput.from_ints(tokenizer.encode(question))
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=["\n"])
    found = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    print(question + tokenizer.decode(found.sequences[0].tokens))
