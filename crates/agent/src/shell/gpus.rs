//! Discovers and watches the GPUs on a separate thread, because calls to the driver block.

use std::{
    io,
    ops::ControlFlow,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use tessera_node::gpus::{Gpus, GpusError};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages};
use crate::controller::{Event, ShellError};

/// Time until the next discovery if no GPU was found or the watch failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Rounds of the watch without an incident between two discoveries.
const ROUNDS_PER_DISCOVERY: u32 = 6;

pub(super) fn watch(
    gpus: Arc<dyn Gpus>,
    health: bool,
    messages: Messages,
    stop: CancellationToken,
) -> io::Result<()> {
    let (stay, ended) = mpsc::channel::<()>();
    let stopped = stop.clone();
    tokio::spawn(async move {
        stopped.cancelled().await;
        drop(stay);
    });
    let work = move || {
        while !stop.is_cancelled() {
            if discover(&*gpus, &messages)
                && health
                && let Err(error) = watch_until_stop(&*gpus, &messages, &stop)
            {
                tracing::warn!(%error, "cannot watch the GPUs for errors; will retry");
            }
            if ended.recv_timeout(RETRY_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    };
    thread::Builder::new().name("gpu-watch".into()).spawn(work)?;
    Ok(())
}

/// Discovers the GPUs and reports them to the controller. Returns whether the discovery succeeded.
fn discover(gpus: &dyn Gpus, messages: &Messages) -> bool {
    let found = gpus.discover().map_err(|error| ShellError::GpuDiscovery(error.to_string()));
    let any = found.is_ok();
    let _ended = messages.send(Message::Event(Event::Gpus(found)));
    any
}

fn watch_until_stop(gpus: &dyn Gpus, messages: &Messages, stop: &CancellationToken) -> Result<(), GpusError> {
    let mut rounds = 0;
    // The result does not matter: unless the agent stops, the caller discovers the GPUs again.
    let _ended = gpus.watch(&mut |incident| {
        if stop.is_cancelled() {
            return ControlFlow::Break(());
        }
        match incident {
            Some(incident) => {
                let _ended = messages.send(Message::Event(Event::Incident(incident)));
            }
            None => {
                rounds += 1;
                if rounds % ROUNDS_PER_DISCOVERY == 0 {
                    discover(gpus, messages);
                }
            }
        }
        ControlFlow::Continue(())
    })?;
    Ok(())
}
