//! Notifications to a service manager such as systemd, for units with `Type=notify`.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Variable with the socket of the service manager. It is not set if nothing waits for a notification.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Sends a state such as `READY=1` to the service manager, if there is one.
pub(crate) fn notify(state: &str) {
    let Some(socket) = std::env::var_os(SOCKET).filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(socket = %socket.display(), state, %error, "cannot notify the service manager");
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    // A leading @ stands for an address without a file.
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sends_the_state_to_files_and_abstract_addresses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("tessera-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
        for (listener, socket) in [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&abstract_address).unwrap(), format!("@{name}").into()),
        ] {
            send(&socket, "READY=1").unwrap();
            let mut buffer = [0; 16];
            let length = listener.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"READY=1");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(send(path.as_os_str(), "READY=1").is_err(), "nobody listens");
    }
}
