//! The output of `nvidia-smi topo -m`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::foreign::smi_matrix;

fuzz_target!(|text: &str| {
    let _ = smi_matrix::parse(text);
});
