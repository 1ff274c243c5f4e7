"""Writes the kernel instances: one .cu for each role, tile and activation, and the list of all.

usage: generate.py OUTPUT_DIRECTORY
Prints the files, one a line, for CMake. Files that would not change are left alone.
"""

import pathlib
import sys

GATED = ("SwiGLU", "SwiGLUOai", "GeGLU", "GeGLUTanh", "ReGLU")
PLAIN = ("SiLU", "GELU", "GELUTanh", "ReLU", "ReLU2")
TYPES = (("__nv_bfloat16", "DType::kBF16"), ("__half", "DType::kF16"))
MAJORS = ("Major::kK", "Major::kMN")
COOPERATIVE_TILES = ("Coop128x256", "Coop128x256Dynamic")
HIDDEN_GRAD_TILES = ("Coop128x256Grad", "PingPong128x128")
DOWN_TILES = (*COOPERATIVE_TILES, "PingPong128x192", "PingPong128x192Dynamic")

# Of the tiles of a role, the rarer activations have the first alone (has_every_tile in tiles.h).
EVERY_TILE = ("SwiGLU", "SwiGLUOai")


def tiles_of(kind, tiles):
    return tiles if kind in EVERY_TILE else tiles[:1]


def instances():
    """(file stem, [(kernel type, key)])"""
    for kind in GATED + PLAIN:
        yield (
            f"up_{kind}",
            [
                (
                    f"UpKernel<{element}, k{tile}, ActivationKind::k{kind}, {major}>",
                    f"{{Role::kUp, {dtype}, TileId::k{tile}, {major}, ActivationKind::k{kind}}}",
                )
                for tile in tiles_of(kind, COOPERATIVE_TILES)
                for element, dtype in TYPES
                for major in MAJORS
            ],
        )
    for kind in GATED + PLAIN:
        yield (
            f"hidden_grad_{kind}",
            [
                (
                    f"HiddenGradKernel<{element}, k{tile}, ActivationKind::k{kind}, {major}>",
                    f"{{Role::kHiddenGrad, {dtype}, TileId::k{tile}, {major}, "
                    f"ActivationKind::k{kind}}}",
                )
                for tile in tiles_of(kind, HIDDEN_GRAD_TILES)
                for element, dtype in TYPES
                for major in MAJORS
            ],
        )
    for kind in GATED:
        yield (
            f"up_paired_{kind}",
            [
                (
                    f"UpPairedKernel<{element}, k{tile}, ActivationKind::k{kind}, Major::kMN>",
                    f"{{Role::kUpPaired, {dtype}, TileId::k{tile}, Major::kMN, "
                    f"ActivationKind::k{kind}}}",
                )
                for tile in tiles_of(kind, COOPERATIVE_TILES)
                for element, dtype in TYPES
            ],
        )
        yield (
            f"hidden_grad_paired_{kind}",
            [
                (
                    f"HiddenGradPairedKernel<{element}, k{tile}, ActivationKind::k{kind}, {major}>",
                    f"{{Role::kHiddenGradPaired, {dtype}, TileId::k{tile}, {major}, "
                    f"ActivationKind::k{kind}}}",
                )
                for tile in ("Coop128x256Grad",)
                for element, dtype in TYPES
                for major in MAJORS
            ],
        )
    yield (
        "weight_grad",
        [
            (
                f"WeightGradKernel<{element}, kCoop128x256, {major}>",
                f"{{Role::kWeightGrad, {dtype}, TileId::kCoop128x256, {major}, "
                "ActivationKind::kSwiGLU}",
            )
            for element, dtype in TYPES
            for major in MAJORS
        ],
    )
    yield (
        "gather_store",
        [
            (
                f"GatherStoreKernel<{element}, kCoop128x256, {major}>",
                f"{{Role::kGather, {dtype}, TileId::kCoop128x256, {major}, "
                "ActivationKind::kSwiGLU}",
            )
            for element, dtype in TYPES
            for major in MAJORS
        ],
    )
    for role, tiles in (("Down", DOWN_TILES), ("DownScaled", COOPERATIVE_TILES)):
        for tile in tiles:
            yield (
                f"{role}_{tile}",
                [
                    (
                        f"{role}Kernel<{element}, k{tile}, {major}>",
                        f"{{Role::k{role}, {dtype}, TileId::k{tile}, {major}, "
                        "ActivationKind::kSwiGLU}",
                    )
                    for element, dtype in TYPES
                    for major in MAJORS
                ],
            )


def write(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    print(path)


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    declarations, copies = [], []
    for stem, entries in instances():
        # Named types: nvcc's host stubs cannot spell a tile shape as a template argument.
        types = "".join(
            f"struct {stem}_{i} : {kernel} {{}};\n" for i, (kernel, _) in enumerate(entries)
        )
        body = ",\n".join(
            f"      {{{key}, reinterpret_cast<const void*>(&grouped_gemm_kernel<{stem}_{i}>)}}"
            for i, (_, key) in enumerate(entries)
        )
        write(
            out / f"{stem}.cu",
            '// Generated by generate.py.\n#include "cuda/roles.cuh"\n\n'
            "namespace sonicmoe::cuda {\n"
            f"{types}"
            f"void list_{stem}(KernelEntry* out) {{\n"
            f"  const KernelEntry entries[] = {{\n{body}}};\n"
            "  for (const KernelEntry& entry : entries) *out++ = entry;\n}\n"
            "}  // namespace sonicmoe::cuda\n",
        )
        declarations.append(f"void list_{stem}(KernelEntry* out);")
        copies.append((stem, len(entries)))
    total = sum(count for _, count in copies)
    lines, at = [], 0
    for stem, count in copies:
        lines.append(f"    list_{stem}(list.data() + {at});")
        at += count
    write(
        out / "kernel_list.cc",
        '// Generated by generate.py.\n#include <array>\n\n#include "cuda/roles.h"\n\n'
        "namespace sonicmoe::cuda {\n" + "\n".join(declarations) + "\n"
        "std::span<const KernelEntry> kernel_list() {\n"
        f"  static const std::array<KernelEntry, {total}> kList = [] {{\n"
        f"    std::array<KernelEntry, {total}> list;\n" + "\n".join(lines) + "\n"
        "    return list;\n  }();\n  return kList;\n}\n"
        "}  // namespace sonicmoe::cuda\n",
    )


if __name__ == "__main__":
    main()
