//! The limits in a control file: the library must survive a file that an older or broken agent wrote.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_limits::control;

fuzz_target!(|file: &[u8]| {
    let _ = control::parse_limits(file);
});
