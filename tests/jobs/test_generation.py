"""Sampling: the job's value, else the model's, else the neutral one."""

import pytest

from batchgen.engine.config import GenerationSettings
from batchgen.engine.generation import resolve_generation
from batchgen.engine.request import Sampling


def resolve(job: dict[str, object], model: dict[str, object]) -> Sampling:
    return resolve_generation(GenerationSettings.model_validate(job), model)[0]


def test_field_by_field() -> None:
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 7, "eos_token_id": 3}
    sampling, origins = resolve_generation(GenerationSettings(temperature=1.0, max_tokens=5), model)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 20, 0.9, 0.0)
    assert sampling.max_tokens == 5
    assert {origins[key] for key in ("temperature", "max_tokens")} == {"job"}
    assert (origins["top_k"], origins["min_p"], origins["n"]) == ("model", "default", "default")


def test_neutral_without_a_model_file() -> None:
    assert resolve({}, {}) == Sampling(max_tokens=256)


def test_do_sample_false_is_greedy_unless_the_job_sets_a_temperature() -> None:
    model = {"do_sample": False, "temperature": 0.6}
    assert resolve({}, model).temperature == 0
    assert resolve({"temperature": 0.5}, model).temperature == 0.5
    assert resolve({}, {"do_sample": True, "temperature": 0.6}).temperature == 0.6
    assert resolve({}, {"temperature": None}).temperature == 1.0


def test_illegal_values_of_the_model_are_named() -> None:
    with pytest.raises(ValueError, match=r"^top_p: "):
        resolve({}, {"top_p": 3.0})
