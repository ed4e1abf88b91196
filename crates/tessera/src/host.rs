//! What the machine gives a program: its name, an address to listen on, the word to end.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// The machine's name, or the pod's; empty where nobody knows it.
pub(crate) fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Listens, and says where: on the port that was found where 0 was asked for.
pub(crate) async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let said = || format!("cannot listen on {address} (--listen names another address)");
    let listener = TcpListener::bind(address).await.with_context(said)?;
    let real = listener.local_addr().with_context(said)?;
    Ok((listener, real))
}

/// Comes back when the program is asked to end: by Ctrl-C, or as container runtimes ask.
pub(crate) fn asked_to_end() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
