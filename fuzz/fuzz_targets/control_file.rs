//! The limits in a control file: a library must not trust a file that an older or broken agent wrote.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_limits::GrantLimits;

fuzz_target!(|bytes: &[u8]| {
    let _ = GrantLimits::from_bytes(bytes);
});
