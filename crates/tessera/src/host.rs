//! What the machine tells a program: its name, and when to end.

use tokio::signal::unix::{SignalKind, signal};

/// The machine's name, or the pod's; empty where nobody knows it.
pub(crate) fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
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
