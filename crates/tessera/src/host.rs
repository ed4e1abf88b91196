//! Services of the host: its name, listening addresses and the signal to end.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Returns the name of the host or pod. Empty if it is unknown.
pub(crate) fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Listens on the address of a flag. Returns the actual address, with the chosen port if port 0 was given.
pub(crate) async fn listen(address: SocketAddr, flag: &str) -> Result<(TcpListener, SocketAddr)> {
    let said = || format!("cannot listen on {address} ({flag} names another address)");
    let listener = TcpListener::bind(address).await.with_context(said)?;
    let real = listener.local_addr().with_context(said)?;
    Ok((listener, real))
}

/// Returns a future that resolves when the process receives SIGTERM or SIGINT.
pub(crate) fn termination_signal() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
