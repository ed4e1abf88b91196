//! The account file of a container: every process of the container may write it, the agent reads it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_limits::AccountSnapshot;

fuzz_target!(|bytes: &[u8]| {
    let _ = AccountSnapshot::from_bytes(bytes);
});
