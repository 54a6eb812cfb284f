"""A tiny MiMo checkpoint: a Qwen2 one with a layer that predicts a further token, and what that layer says."""

import json
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

SOURCE = "model.mtp_layers.0"
NORMS = "token_layernorm", "hidden_layernorm", "final_layernorm"


def tiny_mimo(folder: Path, *, copying: bool = False) -> Path:
    """With random weights; or `copying`: no layer adds anything, so that the further token follows from the one before
    it as that one did.
    """
    tiny.tiny_model("qwen2", folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    layer = {name: value for name, value in tensors.items() if name.startswith("model.layers.0.")}
    found = {name.replace("model.layers.0", SOURCE): _random(value, generator) for name, value in layer.items()}
    hidden = tensors["model.norm.weight"]
    found |= {f"{SOURCE}.{name}.weight": 1 + 0.3 * _random(hidden, generator) for name in NORMS}
    found[f"{SOURCE}.input_proj.weight"] = 0.25 * torch.randn(len(hidden), 2 * len(hidden), generator=generator)
    tensors |= found
    if copying:
        unit = torch.eye(len(hidden))
        tensors[f"{SOURCE}.input_proj.weight"] = torch.cat([0 * unit, unit], dim=1)
        tensors[f"{SOURCE}.token_layernorm.weight"] = torch.ones_like(hidden)
        tensors[f"{SOURCE}.final_layernorm.weight"] = hidden.clone()
        silent = ("o_proj.weight", "down_proj.weight")
        tensors |= {name: torch.zeros_like(value) for name, value in tensors.items() if name.endswith(silent)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return 0.25 * torch.randn(like.shape, generator=generator)


class Reference:
    """The same checkpoint in transformers' Qwen2, the layer as a model of its own, without any cache."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model.safetensors")
        settings = {**json.loads((folder / "config.json").read_text()), "model_type": "qwen2"}
        self._model = self._load(settings, self._tensors)
        layer = {name.replace(SOURCE, "model.layers.0"): value for name, value in self._tensors.items()}
        layer["model.norm.weight"] = self._tensors[f"{SOURCE}.final_layernorm.weight"]
        self._layer = self._load({**settings, "num_hidden_layers": 1, "layer_types": None}, layer)
        self._epsilon = settings["rms_norm_eps"]

    @staticmethod
    def _load(settings: dict, tensors: dict[str, Tensor]) -> Qwen2ForCausalLM:
        model = Qwen2ForCausalLM(Qwen2Config(**settings)).eval()
        wanted = model.state_dict()
        model.load_state_dict({name: tensors[name] for name in wanted})
        return model

    @torch.no_grad()
    def further(self, tokens: list[int]) -> Tensor:
        """[V]: the layer's logits of what follows the last of the tokens, by the states before each of them."""
        states: list[Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda _, given: states.append(given[0][0]))
        self._model(torch.tensor([tokens[:-1]]))
        hook.remove()
        before = torch.cat([torch.zeros_like(states[0][:1]), states[0]])
        parts = self._norm("hidden_layernorm", before), self._norm("token_layernorm", self._embedded(tokens))
        fed = torch.cat(parts, dim=-1) @ self._tensors[f"{SOURCE}.input_proj.weight"].T
        return self._layer(inputs_embeds=fed[None]).logits[0, -1]

    def _embedded(self, tokens: list[int]) -> Tensor:
        return self._tensors["model.embed_tokens.weight"][tokens]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._epsilon)
            * self._tensors[f"{SOURCE}.{name}.weight"]
        )
