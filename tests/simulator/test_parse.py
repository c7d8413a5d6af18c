"""The front end: modules as the compilers write them, scopes, source lines, and refusals by name and line."""

import pytest

from flamia.conformance.simulator import PtxError, parse
from flamia.conformance.simulator.machine.program import build_program
from flamia.conformance.simulator.ops.registry import families
from flamia.conformance.simulator.ptx.lexer import tokenize
from flamia.conformance.simulator.ptx.opcodes import OPCODES
from flamia.conformance.simulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from flamia.kernels.build import build
from flamia.kernels.nvrtc import NvrtcNotFoundError, load_nvrtc
from flamia.kernels.registry import KERNELS
from flamia.kernels.targets import TARGETS

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def body_of(text, declarations=".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;"):
    module = parse(f"{HEAD}.visible .entry k(.param .u64 k_param_0)\n{{ {declarations}\n{text}\nret; }}")
    return module.entry("k")


def instruction(text):
    return body_of(text).instructions[0]


def test_tokens():
    text = "add.rn.f32 %f1, 0f3F800000, -0x1F; // all\n{_, a|b} [%rd1+-8] !%p1 shared::cta.b64 /* of\nit */ 9.0"
    words = [t.text for t in tokenize(text)]
    assert words[:8] == ["add.rn.f32", "%f1", ",", "0f3F800000", ",", "-", "0x1F", ";"]
    assert words[8:] == "{ _ , a | b } [ %rd1 + - 8 ] ! %p1 shared::cta.b64 9.0".split()
    assert [t.line for t in tokenize(text)][-1] == 3
    with pytest.raises(PtxError, match="PTX line 2: cannot read '§'"):
        list(tokenize("ret;\n§"))


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("add.s32 %r1, %r2, -5;", (Register("%r1"), Register("%r2"), Immediate(-5))),
        ("mov.b32 %r1, 0f3F800000;", (Register("%r1"), Immediate(0x3F800000, "f32"))),
        ("mov.b64 %rd1, 0d3FF0000000000000;", (Register("%rd1"), Immediate(0x3FF << 52, "f64"))),
        ("mov.u32 %r1, %tid.x;", (Register("%r1"), Special("%tid.x"))),
        ("mov.u32 %r1, 0xFFFFFFFFU;", (Register("%r1"), Immediate(0xFFFFFFFF))),
        ("mov.b64 %rd1, {%r1, %r2};", (Register("%rd1"), Vector((Register("%r1"), Register("%r2"))))),
        ("ld.u32 %r1, [%rd1+-8];", (Register("%r1"), Address(Register("%rd1"), -8))),
        ("ld.u32 %r1, [%rd1-8];", (Register("%r1"), Address(Register("%rd1"), -8))),
        ("ld.param.u64 %rd1, [k_param_0+4];", (Register("%rd1"), Address(Symbol("k_param_0"), 4))),
        ("mov.u64 %rd1, k_param_0+12;", (Register("%rd1"), Symbol("k_param_0", 12))),
        ("shfl.sync.idx.b32 %r1|%p2, %r2, 0, 31, -1;", None),
        ("setp.eq.and.s32 %p1, %r1, 0, !%p2;", None),
        ("elect.sync _|%p1, -1;", (Pair(Sink(), Register("%p1")), Immediate(-1))),
        (
            "cp.async.bulk.prefetch.tensor.2d.L2.global [%rd1, {%r2, 0}];",
            (Address(Register("%rd1"), 0, (Register("%r2"), Immediate(0))),),
        ),
    ],
)
def test_operands(text, operands):
    found = instruction(text)
    assert isinstance(found, Instruction) and found.opcode == text.split()[0]
    if operands is not None:
        assert found.operands == operands


def test_pairs_and_negated_predicates():
    assert instruction("shfl.sync.idx.b32 %r1|%p2, %r2, 0, 31, -1;").operands[0] == Pair(
        Register("%r1"), Register("%p2")
    )
    assert instruction("setp.eq.and.s32 %p1, %r1, 0, !%p2;").operands[3] == Negated(Register("%p2"))
    assert instruction("@!%p1 bra L; L:").guard.negated


def test_scopes_have_registers_and_labels_of_their_own():
    """Inline PTX in braces declares the same names again and again."""
    function = body_of("{.reg .pred P; W: bra.uni W; @P bra D; D:}\n{.reg .pred P; W: @P bra W;} @%p1 bra W; W:")
    guards = [i.guard.register.name for i in function.instructions if i.guard]
    assert len(set(guards)) == 3 and guards[2] == "%p1"
    targets = [i.operands[0].name for i in function.instructions if i.base == "bra"]
    assert len(set(targets)) == 4 and all(t in function.labels for t in targets)
    assert function.labels["W"] == 4 and function.registers[guards[0]] == "pred"


def test_lines_of_the_source():
    text = f"""{HEAD}.visible .entry k() {{
.reg .b32 %r<3>;
.loc 1 7 3
mov.u32 %r1, 1;
.loc 2 30 1, function_name $L__info_string0, inlined_at 1 8 5
mov.u32 %r2, 2;
.loc 1 0 0
ret;
}}
.file 1 "/a/kernel.cu"
.file 2 "/a/header.cuh"
.section .debug_str {{ $L__info_string0: .b8 95, 0 }}"""
    first, second, third = parse(text).entry("k").instructions
    assert (str(first.source), first.line) == ("/a/kernel.cu:7", 7)
    assert str(second.source) == "/a/header.cuh:30 (inlined at /a/kernel.cu:8)"
    assert third.source == second.source  # line 0 is code of no line


def test_variables():
    module = parse(f"""{HEAD}
.const .align 8 .f32 table[2][2] = {{ {{1, 2}}, {{0f3F800000, -1}} }};
.extern .shared .align 1024 .b8 dynamic[];
.global .u64 pointer = generic(target)+8;
.global .align 4 .b8 target[16];
.visible .entry k(.param .align 8 .b8 p[96], .param .u64 .ptr .global .align 16 q) .maxntid 128, 1, 1 .minnctapersm 2
{{ .shared .align 16 .b8 buffer[64]; .local .align 8 .b8 depot[24]; ret; }}""")
    table, dynamic, pointer = (module.variables[n] for n in ("table", "dynamic", "pointer"))
    assert (table.nbytes, table.align, table.space) == (16, 8, "const")
    assert table.initial == b"\1\0\0\0\2\0\0\0\0\0\x80\x3f\xff\xff\xff\xff"
    assert (dynamic.nbytes, dynamic.external, dynamic.align) == (0, True, 1024)
    assert pointer.references == ((0, "target", 8),)
    entry = module.entry("k")
    assert [(p.name, p.nbytes, p.align) for p in entry.parameters] == [("p", 96, 8), ("q", 8, 8)]
    assert entry.directives == {"maxntid": (128, 1, 1), "minnctapersm": (2,)}
    assert [(v.name, v.space, v.nbytes) for v in entry.variables] == [("buffer", "shared", 64), ("depot", "local", 24)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vadd.s32.s32.s32 %r1, %r2, %r3;", "the opcode 'vadd.s32.s32.s32' is not known"),
        ("tex.1d.v4.f32.s32 {%r1}, [%rd1, {%r2}];", "the opcode 'tex.1d.v4.f32.s32' is not known"),
        ("mov.u32 %r1, %pm0;", "the register '%pm0' is not known"),
        ("@%q1 bra L; L:", "the guard '%q1' is no register"),
        (".reg .b33 %x;", "'.b33' is not the type of a register"),
        (".surf x;", "'.surf' is not known in a body"),
        ("add.s32 %r1 %r2;", "',' was expected, got '%r2'"),
    ],
)
def test_what_is_unknown_is_refused_by_name_and_line(text, words):
    with pytest.raises(PtxError) as caught:
        body_of(f"ret;\n{text}")
    assert str(caught.value) == f"PTX line 7: {words}"


@pytest.mark.parametrize("form", ["mma.sync.aligned.m16n8k16", "wmma.load", "sured.b", "istypep", "alloca", "video"])
def test_families_outside_the_list(form):
    assert form.split(".")[0] not in OPCODES


def test_every_listed_opcode_has_a_family():
    """Branches and calls are the program's own; all else is an instruction family, and no family is unlisted."""
    assert {f.prefix.split(".")[0] for f in families()} | {"bra", "call"} == OPCODES


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("add.rn.s32 %r1, %r1, %r1;", "'add.rn.s32': the modifier '.rn' is not known here"),
        ("bar.wait 0;", "the instruction 'bar.wait' is not known"),
        ("add.s32 %r1, %r1;", "'add.s32': 2 operands where 3 are expected"),
        ("add.s32 %rd1, %r1, %r1;", "'add.s32': %rd1 is no register of 4 bytes"),
        ("add.s64 %rd1, %r1, %rd1;", "'add.s64': %r1 is no s64"),
        ("mov.u32 %r1, nothing;", "'mov.u32': 'nothing' is not declared"),
        ("bra nowhere;", "'bra': Symbol(name='nowhere', offset=0) is no label of this function"),
        ("setp.eq.u32 %r1, %r1, %r1;", "'setp.eq.u32': %r1 is no register of 1 bytes"),
    ],
)
def test_forms_that_do_not_exist_are_refused_when_a_program_is_built(form, words):
    text = f"{HEAD}.visible .entry k()\n{{ .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;\n{form}\nret; }}"
    module = parse(text)
    with pytest.raises(PtxError) as caught:
        build_program(module, module.entry("k"))
    assert str(caught.value) == f"PTX line 6: {words}"


@pytest.mark.parametrize("target", TARGETS, ids=[t.name for t in TARGETS])
def test_every_form_of_every_kernel_is_known(target):
    """A unit of every kernel, as NVRTC compiles it: each instruction has a closure."""
    try:
        load_nvrtc()
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    forms = set()
    for kernel in KERNELS:
        if target not in kernel.targets:
            continue
        unit = kernel.units[0]
        module = parse(build(unit, target).ptx.read_text())
        assert module.target == target.name
        for entry in kernel.entries_of(target):
            program = build_program(module, module.entry(entry.name))
            forms |= {i.opcode for s in program.segments for i in s.instructions}
    assert len(forms) > 120
