//! Kubernetes quantities, as users write them into requests and limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::foreign::quantity::Quantity;

fuzz_target!(|text: &str| {
    if let Ok(quantity) = text.parse::<Quantity>() {
        let _ = (quantity.whole(), quantity.milli(), quantity.mib());
    }
});
