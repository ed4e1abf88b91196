//! The HTTP/2 filter in front of the device plugins: every local process that reaches the socket may write to it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::kubelet::AuthorityFilter;

fuzz_target!(|bytes: &[u8]| {
    // The first byte decides how the rest is cut into pieces, as a socket does.
    let Some((&piece, bytes)) = bytes.split_first() else { return };
    let mut filter = AuthorityFilter::default();
    for received in bytes.chunks(usize::from(piece) + 1) {
        if filter.push(received).is_err() {
            return;
        }
    }
});
