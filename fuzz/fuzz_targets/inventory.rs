//! The inventory annotation of a node, and gputopology's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::foreign::{gpu_topology, unhealthy};
use tessera_wire::tessera::{inventory, static_table};

fuzz_target!(|text: &str| {
    if let Ok(parsed) = inventory::parse(text) {
        assert!(inventory::parse(&inventory::print(&parsed)).is_ok());
    }
    for count in [1, 8] {
        let _ = gpu_topology::parse(text, count);
    }
    let _ = static_table::parse(text);
    let _ = unhealthy::parse(text);
});
