"""The class with which transformers runs an exported arm. A copy of this file lies in the exported folder.

The copy beside it, modeling_arm.py, names the parts of the arm. Nothing of this project needs to be installed.

Needs transformers 5. Shapes: B batch, T tokens, V vocabulary, C channels.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from gpt2.model.init import initial_value, keyed_parts, names_to_set
from gpt2.model.sampling import LayerCache, decoding
from gpt2.model.transformer import GPT2, FirstValues, ModelParts
from ra.settings import AlternationSettings
from ra.spec import AttentionSpec

# inputs and outputs of other models in transformers
INPUTS = ("inputs_embeds", "position_ids")
OUTPUTS = ("output_hidden_states", "output_attentions")
IGNORED = -100  # a label that is not scored, as everywhere in transformers


class ArmConfig(PreTrainedConfig):  # type: ignore[misc]
    """The settings of a trained arm.

    arm: its name in the study, with modifiers. parts: part of the model -> what builds it. alternation: the settings of
    RALEARN. use_cache: whether a cache gives the outputs of the whole sequence. seed: of the run.
    """

    model_type = "attention_arm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        arm: str = "B",
        parts: Mapping[str, str] | None = None,
        vocab_size: int = 257,
        padded_vocab_size: int = 384,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        max_position_embeddings: int = 64,
        dropout: float = 0.0,
        alternation: Mapping[str, Any] | None = None,
        seed: int = 0,
        use_cache: bool = True,
        **options: Any,
    ) -> None:
        self.arm = arm
        self.parts = dict(parts or {})
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.dropout = dropout
        default = AlternationSettings("output", 0.5, 1.0)
        self.alternation = dict(dataclasses.asdict(default) if alternation is None else alternation)
        self.seed = seed
        self.use_cache = use_cache
        super().__init__(**options)


class _Rows(LayerCache):
    """The q, k and v of a layer in a cache of transformers: q and k together as its keys."""

    def __init__(self, cache: DynamicCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer

    def append(self, new: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTD, k_BHTD, v_BHTD = new
        both, values = self.cache.update(torch.cat([q_BHTD, k_BHTD], dim=-1), v_BHTD, self.layer)
        queries, keys = both.split([q_BHTD.shape[-1], k_BHTD.shape[-1]], dim=-1)
        return queries, keys, values


class ArmForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """GPT-2 with the parts of an arm. A subclass names the functions that build them.

    A cache holds queries, keys and values: a reciprocal layer reads earlier queries. Padded batches, and arms whose
    config says use_cache = false, are computed without a cache.
    """

    config_class = ArmConfig
    functions: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {}  # part -> function of ra.hooks
    _no_split_modules: ClassVar[list[str]] = ["GPT2"]  # the head is the token embedding
    _supports_sdpa = True

    def __init__(self, config: ArmConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        dtype = torch.get_default_dtype()
        try:  # on meta, tensors that are not parameters would lose their values
            torch.set_default_dtype(torch.float32)
            with torch.device("cpu"):
                self.model = self._build(config)
        finally:
            torch.set_default_dtype(dtype)
        self.model.to(dtype)
        self._set_by_name = names_to_set(self.model)
        self._names = {module: name for name, module in self.model.named_modules()}
        self._constants = {
            module: {
                name: buffer.clone()
                for name, buffer in module.named_buffers(recurse=False)
                if name in module._non_persistent_buffers_set
            }
            for module in self.model.modules()
        }
        self.post_init()

    def _build(self, config: ArmConfig) -> GPT2:
        spec = AttentionSpec(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            width=config.hidden_size,
            dropout=config.dropout,
            alternation=AlternationSettings(**config.alternation),
            block_size=config.max_position_embeddings,
        )

        def of(part: str) -> Callable[[int], nn.Module] | None:
            function = self.functions.get(part)
            return (lambda layer: function(layer, spec)) if function else None

        position = self.functions.get("position")
        parts = ModelParts(
            of("attention"), of("norm"), of("mlp"), (lambda: position(spec)) if position else None
        )
        return GPT2(
            layers=spec.layers,
            heads=spec.heads,
            width=spec.width,
            block_size=spec.block_size,
            vocabulary=config.vocab_size,
            padded_vocabulary=config.padded_vocab_size,
            dropout=spec.dropout,
            parts=keyed_parts(parts, config.seed),
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set the parameters that no checkpoint gave, and the buffers that no checkpoint has."""
        for name, value in self._constants.get(module, {}).items():
            getattr(module, name).copy_(value)
        for kind, parameter in module.named_parameters(recurse=False):
            name = f"{self._names.get(module)}.{kind}"
            if name in self._set_by_name and not getattr(parameter, "_is_hf_initialized", False):
                value = initial_value(self.config.seed, name, parameter.shape, self.config.num_hidden_layers)
                if name == "token.weight":
                    value[self.config.vocab_size :] = 0.0
                parameter.copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.token

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Embedding:
        raise NotImplementedError("the vocabulary of an exported arm is fixed; fix: use an existing token")

    def gradient_checkpointing_enable(self, *arguments: Any, **options: Any) -> None:
        raise ValueError(
            "an exported arm has no gradient checkpointing; fix: gradient_checkpointing=False and smaller batches"
        )

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Compute `forward`. ValueError for inputs and outputs that an arm does not have."""
        for name in INPUTS:
            if options.pop(name, None) is not None:
                raise ValueError(
                    f"an exported arm takes no {name}; fix: give input_ids and attention_mask only"
                )
        for name in OUTPUTS:
            asked = options.pop(name, None)
            if asked or (asked is None and getattr(self.config, name, False)):
                raise ValueError(f"an exported arm returns logits and loss only; fix: leave out {name}=True")
        return super().__call__(*arguments, **options)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute the logits (B, T, V) of input_ids (B, T), which follow the tokens in the cache, and the loss.

        attention_mask: (B, past + T), 0 for padding at the start or the end of a sequence. labels: (B, T), shifted
        here; -100 is not scored. The loss is the mean in nats over the scored tokens, or their sum divided by
        num_items_in_batch.
        logits_to_keep: of the last positions; 0 for all. ValueError for a mask with holes, and for a cache with
        padding, with gradients, in training mode or of an arm that has none.
        """
        mask_BT = self._padding(attention_mask)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is not None:
            self._check_cache(past_key_values, mask_BT)
        elif (
            use_cache
            and self.config.use_cache
            and mask_BT is None
            and labels is None
            and self._is_inference()
        ):
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            hidden_BTC = self._hidden_after(input_ids, past_key_values)
        elif mask_BT is not None:
            hidden_BTC = self._hidden_without_padding(input_ids, mask_BT)
        else:
            hidden_BTC = self.model.hidden(input_ids)
        if labels is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_BTC = hidden_BTC[:, kept]
        logits_BTV = F.linear(hidden_BTC, self.model.head[: self.model.vocabulary])
        loss = None if labels is None else _loss(logits_BTV, labels, mask_BT, num_items_in_batch)
        found = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past_key_values)
        return found if return_dict is not False else found.to_tuple()

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Give every step all tokens where there is no cache."""
        mask_BT = kwargs.get("attention_mask")
        if not self.config.use_cache or self._padding(mask_BT) is not None:
            kwargs |= {"past_key_values": None, "next_sequence_length": None, "use_cache": False}
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        known = inspect.signature(
            self.forward
        ).parameters  # transformers 5.0 gives cache_position to every model
        return {name: value for name, value in prepared.items() if name in known}

    @staticmethod
    def _padding(mask_BT: Tensor | None) -> Tensor | None:
        """Return the mask of a padded batch as booleans; None without padding. ValueError for a mask with holes."""
        if mask_BT is None or bool(mask_BT.all()):
            return None
        mask_BT = mask_BT.bool()
        if mask_BT.dim() != 2 or bool((mask_BT.int().diff(dim=1) == 1).sum(1).add(mask_BT[:, 0]).gt(1).any()):
            raise ValueError(
                "attention_mask has padding between tokens, which this model cannot skip; fix: pad at the start or the "
                "end of each sequence"
            )
        return mask_BT

    def _is_inference(self) -> bool:
        return not self.training and not torch.is_grad_enabled()

    def _check_cache(self, cache: DynamicCache, mask_BT: Tensor | None) -> None:
        problem = ""
        if not self.config.use_cache:
            problem = f"{self.config.arm} cannot be computed with a cache"
        elif not isinstance(cache, DynamicCache):
            problem = f"{type(cache).__name__} is not a DynamicCache"
        elif mask_BT is not None:
            problem = "a padded batch cannot be computed with a cache"
        elif not self._is_inference():
            problem = "a cache is for evaluation mode and torch.no_grad()"
        if problem:
            raise ValueError(f"{problem}; fix: use_cache=False, without past_key_values")

    def _hidden_after(self, ids_BT: Tensor, cache: DynamicCache) -> Tensor:
        """Compute x_BTC of tokens that follow those in the cache, as gpt2.model.sampling.logits does."""
        start = cache.get_seq_length()
        if start + ids_BT.shape[1] > self.model.block_size:
            raise ValueError(
                f"{start + ids_BT.shape[1]} tokens exceed the block size {self.model.block_size}"
            )
        x_BTC = self.model.position(self.model.token(ids_BT), start)
        first = FirstValues()
        for layer, block in enumerate(self.model.blocks):
            with decoding(block.attention, _Rows(cache, layer), start):
                x_BTC = block(x_BTC, first)
        hidden: Tensor = self.model.norm(x_BTC)
        return hidden

    def _hidden_without_padding(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Compute x_BTC where every sequence begins at position 0: padding moves to the end, where nothing reads it."""
        first_B1 = mask_BT.int().argmax(1, keepdim=True)
        place_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        moved_BT = ids_BT.gather(1, (place_BT + first_B1) % ids_BT.shape[1])
        moved_BTC = self.model.hidden(moved_BT)
        back_BT = (place_BT - first_B1) % ids_BT.shape[1]
        return moved_BTC.gather(1, back_BT[..., None].expand_as(moved_BTC))


def _loss(
    logits_BTV: Tensor, labels_BT: Tensor, mask_BT: Tensor | None, items: Tensor | int | None
) -> Tensor:
    """Return the mean cross-entropy of the next tokens, or its sum over `items`. Padding predicts nothing."""
    targets_BT = labels_BT[:, 1:]
    if mask_BT is not None:
        targets_BT = targets_BT.masked_fill(~(mask_BT[:, :-1] & mask_BT[:, 1:]), IGNORED)
    loss = F.cross_entropy(
        logits_BTV[:, :-1].float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="mean" if items is None else "sum",
    )
    return loss if items is None else loss / items
