"""What of a CPU is in the contract: whatever compute libraries choose kernels and block sizes by, and no more."""

from __future__ import annotations

import pytest

from corun.node.vllm import processor

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse2 smep avx2 f16c fma avx512f avx512_bf16 misalignsse amx_tile amx_bf16

processor\t: 1
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu
"""
ARM = """\
processor\t: 0
Features\t: fp asimd evtstrm aes asimdhp sve bf16 i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        (
            X86,
            "Intel(R) Xeon(R) Processor, vendor_id GenuineIntel, cpu family 6, model 143",
            ("amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512f", "f16c", "fma", "sse2"),
        ),
        (ARM, "CPU implementer 0x41, CPU part 0xd40", ("asimd", "asimdhp", "bf16", "fp", "i8mm", "sve")),
        ("", "", ()),
    ],
)
def test_a_processor_is_its_model_and_the_extensions_that_kernels_are_chosen_by(
    text: str, name: str, features: tuple[str, ...]
) -> None:
    found = processor.parse(text)
    assert (found.name, found.features) == (name, features)


def test_two_machines_of_one_name_may_differ() -> None:
    virtual = processor.parse(X86.replace(" amx_tile amx_bf16", ""))
    assert virtual.name == processor.parse(X86).name
    assert set(processor.parse(X86).features) - set(virtual.features) == {"amx_bf16", "amx_tile"}


def test_order_and_other_flags_do_not_matter() -> None:
    assert processor.parse(X86.replace("fpu sse2 smep", "sse2 erms fpu")) == processor.parse(X86)


def test_this_machine_has_a_processor() -> None:
    found = processor.read()
    assert found.name
    assert found.features == tuple(sorted(found.features)) != ()
    assert len(found.caches) == 3
    assert found == processor.read()
