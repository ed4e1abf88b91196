//! The quota ConfigMap, as an administrator writes it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::foreign::quota;

fuzz_target!(|json: &str| {
    let _ = quota::parse(json, "home");
    let _ = quota::parse_settings(json);
});
