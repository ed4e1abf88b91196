//! A program that is throttled to its share, as the library in its container would account for it.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use tessera_core::request::{Request, Share};
use tessera_limits::files::{account_path, open_account};
use tessera_limits::memory_account::ProcessIdentity;
use tessera_wire::kubelet::device_plugin::ContainerAllocateResponse;

use super::BUSY;

/// Time between two updates of the account.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// A running program. It ends when this value is dropped.
#[derive(Debug)]
pub(super) struct WaitingProgram {
    _running: mpsc::Sender<()>,
}

impl WaitingProgram {
    /// Starts the program of a container, unless the container never waits.
    pub(super) fn start(
        container: &str,
        pid: u32,
        request: Request,
        given: &ContainerAllocateResponse,
    ) -> io::Result<Option<Self>> {
        let Request::Share(Share { compute_percent, .. }) = request else { return Ok(None) };
        // A container with memory alone may use all idle time.
        if container != BUSY || compute_percent.0 == 0 {
            return Ok(None);
        }
        let mut folders = given.mounts.iter().map(|mount| Path::new(&mount.host_path));
        let Some(folder) = folders.find(|folder| account_path(folder).exists()) else { return Ok(None) };
        let account = open_account(folder)?;
        let process = ProcessIdentity { id: pid, started_ticks: pid.into() };
        let claimed = account.claim(process, pid, |_| {});
        let place = claimed.ok_or_else(|| io::Error::other("the account of the container is full"))?;
        let waits_percent = 100u32.saturating_sub(compute_percent.0);
        let waited = UPDATE_INTERVAL * waits_percent / 100;
        let waited_ns = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        let (running, ended) = mpsc::channel::<()>();
        std::thread::Builder::new().name("program".to_owned()).spawn(move || {
            while ended.recv_timeout(UPDATE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let slot = account.slot(place);
                slot.waited.fetch_add(waited_ns, Ordering::Relaxed);
                slot.waits.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        Ok(Some(Self { _running: running }))
    }
}
