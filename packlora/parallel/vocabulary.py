"""Embedding and output layer of a model that is cut: each process holds the rows of some words of the vocabulary.

The embedding gives each process the vectors of its own words, and a sum over the group gives it the others': one message of the
size of the hidden states. The loss takes the logits of the words that are here, and the processes tell one another two numbers
a row (ops/cross_entropy/parts.py, VocabularyPart); the gradient of the hidden states is added up. So neither the
logits nor a weight is whole anywhere. Who asks the output layer for logits is given all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from transformers import PreTrainedModel

from packlora.ops.cross_entropy.parts import VocabularyPart
from packlora.parallel.collectives import add_up, all_of, copied, gathered, summed

Forward = Callable[[torch.Tensor], torch.Tensor]


def cut_vocabulary(model: PreTrainedModel, group: dist.ProcessGroup) -> bool:
    """Cut the embedding and the output layer, in place; tied ones stay tied. All processes of the group call it. What has no
    parameters is on another stage, and is left alone.

    Returns:
        Whether they were cut. They stay whole where they are no embedding without max_norm and no plain linear layer, or where
        there are fewer words than processes.
    """
    head, embedding, degree = model.get_output_embeddings(), model.get_input_embeddings(), dist.get_world_size(group)
    has_head, has_embedding = (next(one.parameters(), None) is not None for one in (head, embedding))
    if has_head and (type(head) is not torch.nn.Linear or head.out_features < degree):
        return False
    if has_embedding and (not isinstance(embedding, torch.nn.Embedding) or embedding.max_norm is not None):
        return False
    if has_embedding and embedding.num_embeddings < degree:
        return False
    tied = has_head and has_embedding and head.weight is embedding.weight
    if has_embedding:
        own = part_of(embedding.num_embeddings, group)
        embedding.weight = _rows(embedding.weight, own)
        embedding.vocabulary = own
        embedding.padding_idx = None  # says which gradient is 0, and may be a word of another process
        embedding.forward = partial(_embedded, embedding.forward, own, group)
    if has_head:
        part = part_of(head.out_features, group)
        head.weight = embedding.weight if tied else _rows(head.weight, part)
        if head.bias is not None:
            head.bias = _rows(head.bias, part)
        head.vocabulary = part
        head.forward = partial(_all_logits, head.forward, part, group)
    return True


def part_of(words: int, group: dist.ProcessGroup) -> VocabularyPart:
    """Equal shares of the words in order, one more on the first processes where they do not divide."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    each, more = divmod(words, degree)
    return VocabularyPart(
        words, rank * each + min(rank, more), each + (rank < more), -(-words // degree),
        join=lambda own: torch.stack(all_of(own, group)), add_up=partial(add_up, group=group),
    )  # fmt: skip


def _rows(whole: torch.Tensor, part: VocabularyPart) -> torch.nn.Parameter:
    """A copy, so that the whole one can go."""
    return torch.nn.Parameter(whole.detach()[part.start : part.start + part.count].clone(), requires_grad=False)


def _embedded(own_words: Forward, part: VocabularyPart, group: dist.ProcessGroup, ids: torch.Tensor) -> torch.Tensor:
    """Vectors of all words: zeros here for those of other processes, and the sum."""
    others = (ids < part.start) | (ids >= part.start + part.count)
    return summed(own_words((ids - part.start).masked_fill(others, 0)).masked_fill(others[..., None], 0), group)


def _all_logits(
    own_words: Forward, part: VocabularyPart, group: dist.ProcessGroup, hidden: torch.Tensor
) -> torch.Tensor:
    """Gather the logits of the whole vocabulary from the slices of the ranks."""
    share = pad(own_words(copied(hidden, group)), (0, part.share - part.count))
    whole, degree = gathered(share, group), dist.get_world_size(group)
    fewer = degree * part.share - part.words  # processes with a word less, which come last
    if not fewer:
        return whole
    full = whole[..., : (degree - fewer) * part.share]
    rest = whole[..., (degree - fewer) * part.share :].unflatten(-1, (fewer, part.share))
    return torch.cat([full, rest[..., : part.share - 1].flatten(-2)], -1)
