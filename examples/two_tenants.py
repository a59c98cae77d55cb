"""Two clients with adapters of different ranks and kinds train at once on one service, in the same microbatches.

packlora serve                                        # in another terminal
TINKER_BASE_URL=http://127.0.0.1:8000 python examples/two_tenants.py
"""

import sys
import threading

import tinker
from tinker import types

base = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


def train(key: str, text: str, rank: int, **packlora: object) -> None:
    """A tenant: packlora holds what the protocol itself has no words for."""
    client = tinker.ServiceClient(api_key=key)
    own = {"packlora": packlora}
    model = client.create_lora_training_client(base_model=base, rank=rank, seed=0, user_metadata=own).result()
    ids = model.get_tokenizer().encode(text)
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})
    for step in range(8):
        losses = model.forward_backward([datum], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(f"{key}: step {step + 1}, loss {losses.result().metrics['loss:sum']:.3f}")


tenants = [
    threading.Thread(target=train, args=("tml-anna", "The quick brown fox jumps over the lazy dog.", 8)),
    threading.Thread(
        target=train,
        args=("tml-bert", "Pack my box with five dozen liquor jugs.", 32),
        kwargs={"use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
]
for tenant in tenants:
    tenant.start()
for tenant in tenants:
    tenant.join()
