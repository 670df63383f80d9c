"""A vLLM plugin that fixes dynamic adapters in vLLM 0.32. vLLM calls `register` in its processes.

Unloading an adapter removes it from the engine, not only from the list of names. On a CPU the index -1, "no adapter",
selects the last slot; this plugin leaves rows of the base model unchanged. It applies each adapter's weights once to
all of the adapter's tokens, and does not gather them again for every token.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import torch
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.logger import init_logger
from vllm.lora.punica_wrapper import punica_cpu

logger = init_logger(__name__)

Groups = list[tuple[int, torch.Tensor | slice]]  # slot of an adapter -> its tokens

_removing: set[asyncio.Task[bool]] = set()
_Original = punica_cpu.PunicaWrapperCPU
_NEEDED = ("update_metadata", "_apply_shrink", "_apply_expand", "add_lora_embedding", "add_lora_logits")


def register() -> None:
    """Called once or more in each process of vLLM."""
    unload = OpenAIServingModels.unload_lora_adapter
    if not hasattr(unload, "is_batchmills"):
        OpenAIServingModels.unload_lora_adapter = _remove_from_engine(unload)
    punica_cpu.PunicaWrapperCPU = AdapterByAdapter


def _remove_from_engine(unload: Any) -> Any:
    @functools.wraps(unload)
    async def unload_and_remove(self: Any, request: Any) -> Any:
        lora = self.lora_requests.get(request.lora_name)
        answer = await unload(self, request)
        if lora is not None and isinstance(answer, str):
            # The engine handles messages in order between steps, so the next load need not wait for this removal.
            removing = asyncio.create_task(self.engine_client.remove_lora(lora.lora_int_id))
            _removing.add(removing)
            removing.add_done_callback(_on_removed)
        return answer

    unload_and_remove.is_batchmills = True  # type: ignore[attr-defined]
    return unload_and_remove


def _on_removed(task: asyncio.Task[bool]) -> None:
    _removing.discard(task)
    if not task.cancelled() and task.exception() is not None:
        logger.error("an unloaded adapter could not be removed from the engine", exc_info=task.exception())


class AdapterByAdapter(_Original):
    """Applies adapters one after another, each to its own tokens. Where vLLM compiles, base tokens are masked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        missing = [name for name in _NEEDED if not hasattr(_Original, name)]
        if missing:
            raise RuntimeError(
                f"batchmill does not support adapters on a CPU with this vLLM version: it has no {', '.join(missing)}; "
                "install the version in batchmill's documentation"
            )
        super().__init__(*args, **kwargs)
        self._tokens: Groups = []
        self._samples: Groups = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._tokens = _groups(self.token_lora_indices)
        self._samples = _groups(self.sampler_indices)

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        y = y.view(-1, y.shape[-1])
        if torch.compiler.is_compiling():
            y.copy_(scale * _gathered(x, w_t_all, self.token_lora_indices, y.dtype))
            return
        y.zero_()
        _add(y, x, w_t_all, self._tokens, scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = y[:, y_offset : y_offset + y_slice_size]
        if not add_inputs:
            part.zero_()
        if torch.compiler.is_compiling():
            part += _gathered(x, w_t_all, self.token_lora_indices, y.dtype)
        else:
            _add(part, x, w_t_all, self._tokens)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        self._apply_expand(y, x, lora_b_stacked, 0, y.shape[-1], add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        if buffer is None:
            buffer = torch.empty((x.size(0), lora_b_stacked.size(-1)), dtype=torch.float32, device=x.device)
        if torch.compiler.is_compiling():
            shrunk = scale * _gathered(x, lora_a_stacked, self.sampler_indices, buffer.dtype)
            y += _gathered(shrunk, lora_b_stacked, self.sampler_indices, y.dtype)[:, : y.shape[1]]
            return
        buffer.zero_()
        _add(buffer, x, lora_a_stacked, self._samples, scale)
        _add(y, buffer, lora_b_stacked, self._samples)


def _groups(slots: torch.Tensor) -> Groups:
    """The tokens of each slot, as a slice if they are consecutive, without tokens of the base (slot -1)."""
    present, counts = torch.unique(slots, return_counts=True)
    groups: Groups = []
    for slot, count in zip(present.tolist(), counts.tolist(), strict=True):
        if slot < 0:
            continue
        positions = (slots == slot).nonzero().squeeze(1)
        first, last = int(positions[0]), int(positions[-1])
        groups.append((slot, slice(first, last + 1) if last - first + 1 == count else positions))
    return groups


def _add(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, groups: Groups, scale: float = 1.0) -> None:
    """y[tokens] += scale * (x[tokens] @ weights[slot].T) for every group, computed in float32."""
    for slot, tokens in groups:
        weight = weights[slot].squeeze(0) if weights.dim() == 4 else weights[slot]
        product = x[tokens].float() @ weight.float().t()
        width = min(product.shape[1], y.shape[1])  # an adapter and its model may be padded differently
        if scale != 1.0:
            product *= scale
        y[tokens, :width] += product[:, :width].to(y.dtype)


def _gathered(x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x[token] @ weights[slot of token].T, and zeros for tokens of the base. The graph is the same for all slots."""
    selected = weights[slots.clamp_min(0)].to(dtype)
    if selected.dim() == 4:
        selected = selected.squeeze(1)
    product = torch.einsum("bi,boi->bo", x.to(dtype), selected)
    return product * (slots >= 0).unsqueeze(1).to(dtype)
