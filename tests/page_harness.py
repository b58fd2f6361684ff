"""Drives a model and an attention backend through pages, as the runner does, without the runner."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, KVTensors
from mizzen.attention.registry import make_attention
from mizzen.models.decoder import Decoder

torch.set_num_threads(1)  # the models are tiny, and tests may share the machine


@dataclass
class Sequence:
    pages: list[int]
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)


class Harness:
    """Sequences with pages in shuffled order, so that nothing works by being contiguous."""

    def __init__(self, model: Decoder, *, num_sequences: int, max_tokens: int, page_size: int = 16) -> None:
        self.model = model
        self.page_size = page_size
        per_sequence = -(-max_tokens // page_size)
        num_pages = num_sequences * per_sequence
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.kv = KVTensors.allocate(
            model.num_layers,
            num_pages,
            page_size,
            model.num_kv_heads,
            model.head_dim,
            model.dtype,
            torch.device("cpu"),
        )
        self.attention: AttentionBackend = make_attention(
            "sdpa", self.kv, num_heads=model.num_heads, device=torch.device("cpu")
        )
        self.sequences = [Sequence(order[i * per_sequence : (i + 1) * per_sequence]) for i in range(num_sequences)]

    def batch(self, rows: list[tuple[int, list[int]]], every: bool = False) -> Batch:
        """``rows``: (sequence, its new tokens); rows of one token must come first. ``every``: logits of all tokens."""
        token_ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        query_start, seq_lens, samples = [0], [], []
        for index, tokens in rows:
            sequence = self.sequences[index]
            for position, token in enumerate(tokens, sequence.num_computed):
                token_ids.append(token)
                positions.append(position)
                page, offset = divmod(position, self.page_size)
                kv_slots.append(sequence.pages[page] * self.page_size + offset)
            sequence.tokens += tokens
            sequence.num_computed += len(tokens)
            seq_lens.append(sequence.num_computed)
            samples.append(len(token_ids) - 1)
            query_start.append(len(token_ids))
        width = -(-max(seq_lens) // self.page_size)
        num_decode = next((i for i, (_, tokens) in enumerate(rows) if len(tokens) > 1), len(rows))
        return Batch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            kv_slots=torch.tensor(kv_slots),
            page_table=torch.tensor([self.sequences[i].pages[:width] for i, _ in rows], dtype=torch.int32),
            row_slots=torch.arange(len(rows), dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            sample_tokens=torch.arange(len(token_ids)) if every else torch.tensor(samples),
            num_decode_rows=num_decode,
            seq_lens_host=seq_lens,
            query_start_host=query_start,
        )

    @torch.inference_mode()
    def step(self, rows: list[tuple[int, list[int]]], every: bool = False) -> Tensor:
        """Logits [rows, V], or [T, V] if ``every``."""
        batch = self.batch(rows, every)
        self.attention.plan(batch)
        hidden = self.model(batch, self.attention)
        return self.model.logits(hidden[batch.sample_tokens])

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, decoded in one batch."""
        out = [[int(self.step([(i, prompt)]).argmax())] for i, prompt in enumerate(prompts)]
        for _ in range(num_tokens - 1):
            chosen = self.step([(i, tokens[-1:]) for i, tokens in enumerate(out)]).argmax(-1).tolist()
            for tokens, token in zip(out, chosen, strict=True):
                tokens.append(token)
        return out
