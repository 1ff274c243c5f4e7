"""Writes a C file that gives the emulator the PTX of objects (emulator/runtime/module.h).

usage: gather_ptx.py FILE.c OBJECT... The PTX of an object is OBJECT.ptx, from ptxas_gate.py --ptx.
"""

import sys
from pathlib import Path

TEMPLATE = """\
__asm__(".section .rodata\\n"
        "emulated_ptx_begin:\\n"
{texts}        "emulated_ptx_end:\\n"
        ".text\\n");
extern const char emulated_ptx_begin[] __attribute__((visibility("hidden")));
extern const char emulated_ptx_end[] __attribute__((visibility("hidden")));
void emulator_add_ptx(const char* begin, const char* end);
__attribute__((constructor)) static void add_ptx(void) {{
  emulator_add_ptx(emulated_ptx_begin, emulated_ptx_end);
}}
"""


def main() -> None:
    target, *objects = sys.argv[1:]
    texts = ""
    for name in objects:
        ptx = Path(name + ".ptx").resolve(strict=True)
        texts += f'        ".incbin \\"{ptx}\\"\\n.byte 0\\n"\n'
    Path(target).write_text(TEMPLATE.format(texts=texts), encoding="utf-8")


if __name__ == "__main__":
    main()
