//! Looking for the GPUs, and watching them, on a thread of their own: the driver blocks.

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

/// How soon GPUs that were not there, or cannot be watched, are looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Quiet rounds of watching before the GPUs are looked at again.
const ROUNDS: u32 = 6;

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
            if look(&*gpus, &messages)
                && health
                && let Err(error) = watch_until_stop(&*gpus, &messages, &stop)
            {
                tracing::warn!("GPUs are not watched for errors: {error}");
            }
            if ended.recv_timeout(LOOK_AGAIN) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    };
    thread::Builder::new().name("cards".into()).spawn(work)?;
    Ok(())
}

/// Looks for the GPUs; whether there are any.
fn look(gpus: &dyn Gpus, messages: &Messages) -> bool {
    let found = gpus.discover().map_err(|error| ShellError::GpuDiscovery(error.to_string()));
    let any = found.is_ok();
    let _ended = messages.send(Message::Event(Event::Gpus(found)));
    any
}

fn watch_until_stop(gpus: &dyn Gpus, messages: &Messages, stop: &CancellationToken) -> Result<(), GpusError> {
    let mut rounds = 0;
    // However it ended, the GPUs are looked for again, unless all is to end.
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
                if rounds % ROUNDS == 0 {
                    look(gpus, messages);
                }
            }
        }
        ControlFlow::Continue(())
    })?;
    Ok(())
}
