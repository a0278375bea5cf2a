"""Choice of the model that a name means among several GGUF files."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.models.gguf.choosing import (
    AmbiguousModelError,
    chosen_model,
    is_language_model,
    models_among,
)
from aioserve.models.hub import HubName, wanted_files

REPOSITORY = [
    "README.md",
    "config.json",
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny.q8_0.gguf",
    "tiny-UD-Q2_K_XL.gguf",
    "BF16/tiny-BF16-00001-of-00003.gguf",
    "BF16/tiny-BF16-00002-of-00003.gguf",
    "BF16/tiny-BF16-00003-of-00003.gguf",
]
BF16 = tuple(REPOSITORY[-3:])


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        (None, ("tiny-Q4_K_M.gguf",)),
        ("q4_k_m", ("tiny-Q4_K_M.gguf",)),
        ("Q4_K_S", ("tiny-Q4_K_S.gguf",)),
        ("Q8_0", ("tiny.q8_0.gguf",)),
        ("UD-Q2_K_XL", ("tiny-UD-Q2_K_XL.gguf",)),
        ("Q2_K_XL", ("tiny-UD-Q2_K_XL.gguf",)),
        ("BF16", BF16),
    ],
)
def test_a_tag_is_the_end_of_a_name_or_a_folder(tag: str | None, files: tuple[str, ...]) -> None:
    assert chosen_model(REPOSITORY, tag) == files
    assert wanted_files(HubName("o/n", tag), REPOSITORY) == files


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("tiny-it-Q4_K_M.gguf", ("Q4_K_M", "it-Q4_K_M", "tiny-it-q4_k_m")),
        ("tiny_q8_0.gguf", ("Q8_0", "tiny_Q8_0")),
        ("tiny.i1-IQ3_XXS.gguf", ("IQ3_XXS", "i1-IQ3_XXS")),
        ("tiny-MXFP4_MOE.gguf", ("MXFP4_MOE",)),
        ("tiny-Q2_K_S-imatrix.gguf", ("Q2_K_S",)),
        ("my_model_chat.gguf", ("chat", "model_chat")),
        ("F16.gguf", ("f16",)),
    ],
)
def test_a_tag_is_whole_words(name: str, tags: tuple[str, ...]) -> None:
    for tag in tags:
        assert chosen_model([name, "other.gguf"], tag) == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "imatrix.gguf",
        "imatrix_unsloth.gguf",
        "IMATRIX-a.GGUF",
        "imatrix-tiny-Q8_0.gguf",
        "quants/tiny.imatrix.gguf",
        "tiny-chat-imatrix.gguf",
        "tiny-F16.imatrix.gguf",
        "imatrix.dat",
        "tiny.imatrix",
        "imatrix_unsloth.gguf_file",
    ],
)
def test_importance_matrices_are_no_models(name: str) -> None:
    assert not is_language_model(name)


@pytest.mark.parametrize(
    "name",
    [
        "tiny-imatrix-Q4_K_M.gguf",
        "tiny-Q2_K_S-imatrix.gguf",
        "tiny-NEO-IMATRIX-MAX-IQ4_XS.gguf",
        "tiny-imat-Q6_K.gguf",
        "imatrixed-Q4_0.gguf",
        "imatrix/tiny-Q4_0.gguf",
        "tiny-IQ2XXS-chat-v2-imatrix.gguf",
        "tiny-MXFP4_MOE-Imatrix.gguf",
    ],
)
def test_models_that_were_made_with_an_importance_matrix_are_models(name: str) -> None:
    assert is_language_model(name)


@pytest.mark.parametrize(
    ("names", "tag", "says"),
    [
        (["a.json"], None, "it has no GGUF files"),
        (["mmproj-a.gguf"], None, "no language model in GGUF, only what goes with one: mmproj-a"),
        (["a-Q5_0.gguf", "a-Q8_0.gguf"], None, "no GGUF model is Q4_K_M; name one of a-Q5_0.gguf"),
        (["a-Q5_0.gguf"], "Q8_0", r"no GGUF model is Q8_0; name one of a-Q5_0\.gguf"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], None, "2 GGUF models are Q4_K_M; name one of a-Q4"),
        (["a-XQ8_0.gguf", "b.gguf"], "Q8_0", "no GGUF model is Q8_0"),
        (["a-Q4_K_M.gguf", "b.gguf"], "K_M", "no GGUF model is K_M"),
        (["a-Q4_K_M.gguf", "b.gguf"], "M", "no GGUF model is M"),
        (["a_q8_0.gguf", "b.gguf"], "0", "no GGUF model is 0"),
        (["a-UD-Q2_K_XL.gguf", "b.gguf"], "XL", "no GGUF model is XL"),
        ([f"a{i:02}.gguf" for i in range(20)], None, r"a11\.gguf and 8 more$"),
    ],
)
def test_what_tells_no_model_is_refused_with_what_there_is(
    names: list[str], tag: str | None, says: str
) -> None:
    with pytest.raises(AmbiguousModelError, match=says):
        chosen_model(names, tag)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("mmproj-F16.gguf", "mmproj-F16.gguf is no language model, it goes with one"),
        (BF16[1], f"{BF16[1]} is a part of a model: name its first part"),
        ("absent.gguf", "it has no absent.gguf; there are BF16/tiny-BF16-00001-of-00003.gguf, "),
    ],
)
def test_a_file_that_is_no_model_is_refused_by_name(file: str, says: str) -> None:
    with pytest.raises(AmbiguousModelError, match=re.escape(says)):
        wanted_files(HubName("o/n", None, file), REPOSITORY)


def test_a_file_brings_its_other_parts() -> None:
    assert wanted_files(HubName("o/n", None, BF16[0]), REPOSITORY) == BF16
    assert wanted_files(HubName("o/n", None, "tiny.q8_0.gguf"), REPOSITORY) == ("tiny.q8_0.gguf",)


def test_a_model_in_the_other_layout_comes_first_unless_a_gguf_file_is_named() -> None:
    files = [*REPOSITORY, "model.safetensors", "onnx/model.json"]
    assert wanted_files(HubName("o/n"), files) == ("config.json", "model.safetensors")
    assert wanted_files(HubName("o/n", "Q4_K_M"), files) == ("tiny-Q4_K_M.gguf",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", HubName("a/b")),
        ("a/b:Q4_K_M", HubName("a/b", "Q4_K_M")),
        ("a/b-GGUF/b.gguf", HubName("a/b-GGUF", None, "b.gguf")),
        ("a/b/Q8_0/b.GGUF", HubName("a/b", None, "Q8_0/b.GGUF")),
        *(
            (name, None)
            for name in ("a", "a:b", "/a/b", "./a/b", "a/b/c", "a/b.gguf", "~/a/b.gguf")
        ),
        *(
            (name, None)
            for name in ("a/b:", "a/b:c:d", "a/b/../c.gguf", "a/b/.gguf", "a/b:Q8/c.gguf")
        ),
    ],
)
def test_names_of_the_hub(name: str, expected: HubName | None) -> None:
    assert HubName.of(name) == expected


names = st.lists(
    st.from_regex(
        r"(mmproj-)?[ab](-Q[48]_0)?(-0000[12]-of-0000[123])?\.(gguf|json)", fullmatch=True
    ),
    unique=True,
    max_size=8,
)


@given(names=names, tag=st.sampled_from([None, "Q4_0", "Q8_0"]))
def test_what_is_chosen_is_one_whole_model(names: list[str], tag: str | None) -> None:
    models = models_among(names)
    assert all(is_language_model(first) and first in names for first in models)
    try:
        chosen = chosen_model(names, tag)
    except AmbiguousModelError:
        assert len(models) != 1 or tag is not None
        return
    assert chosen == models[chosen[0]]
    assert tag is None or tag in chosen[0]
