//! The arbiter of a node: reads the demand of containers from their accounts and writes windows
//! into their control files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use tessera_limits::control::Control;
use tessera_limits::files::{self, OwnedMapping};
use tessera_limits::limits::ShareMeaning;
use tessera_limits::memory_account::{AccountSnapshot, WindowDemand};
use tessera_limits::{Bytes, GrantLimits, UuidBytes, futex};

use crate::gpu_arbiter::{GpuArbiter, Share, TenantReport, WindowAction, WindowUsage};

/// Interval in nanoseconds between two steps while a container wants a GPU. The arbiter polls,
/// because a container may be unable to reach its wake-up pipe.
const BUSY_POLL_INTERVAL_NS: u64 = 10_000_000;
/// Interval in nanoseconds between two steps while no container wants a GPU. Far below the
/// heartbeat timeout.
const IDLE_POLL_INTERVAL_NS: u64 = 50_000_000;
/// Interval in nanoseconds between two reads of the account of a container that wants nothing.
const QUIET_ACCOUNT_INTERVAL_NS: u64 = 400_000_000;

/// Shortest interval in nanoseconds between two steps, however many wake-ups arrive.
const MIN_STEP_INTERVAL_NS: u64 = 50_000;
/// Number of wake-ups of one container per second. A container that sends more is ignored until the
/// next second.
const MAX_WAKEUPS_PER_SECOND: u32 = 4_000;
const SECOND_NS: u64 = 1_000_000_000;

/// All grants of a node and the GPUs that they share.
#[derive(Debug, Default)]
pub struct Service {
    tenants: HashMap<PathBuf, Tenant>,
    gpus: HashMap<UuidBytes, GpuArbiter<u64>>,
    last_id: u64,
}

/// One grant. The account is read and never mapped: access to a mapping of a truncated file would
/// kill the agent.
#[derive(Debug)]
struct Tenant {
    id: u64,
    control: OwnedMapping<Control>,
    account: File,
    wakeup_pipe: File,
    /// Start of the current second, and the number of wake-ups since then.
    wakeups: (u64, u32),
    limits: GrantLimits,
    revision: u64,
    snapshot: AccountSnapshot,
    /// Time of the last read of the account, or `None` if the container has sent a wake-up since.
    read_at: Option<u64>,
}

impl Service {
    /// Adds the grant in `directory`.
    ///
    /// # Errors
    /// An error if a file of the grant cannot be opened or its limits are invalid.
    pub fn add(&mut self, directory: &Path) -> io::Result<()> {
        let control = files::open_control_writable(directory)?;
        let limits = control.read().map_err(|invalid| io::Error::new(io::ErrorKind::InvalidData, invalid))?;
        let (account, wakeup_pipe) =
            (File::open(files::account_path(directory))?, files::open_wakeup_pipe(directory)?);
        self.last_id += 1;
        let (id, revision) = (self.last_id, control.revision());
        self.set_shares(id, &limits);
        let tenant = Tenant {
            id,
            control,
            account,
            wakeup_pipe,
            wakeups: (0, 0),
            limits,
            revision,
            snapshot: AccountSnapshot::default(),
            read_at: None,
        };
        self.tenants.insert(directory.into(), tenant);
        Ok(())
    }

    /// Removes the grant in `directory`, if there is one.
    pub fn remove(&mut self, directory: &Path) {
        if let Some(tenant) = self.tenants.remove(directory) {
            self.gpus.values_mut().for_each(|gpu| gpu.remove(tenant.id));
        }
    }

    /// Returns what a grant has used of a GPU.
    #[must_use]
    pub fn usage(&self, directory: &Path, uuid: UuidBytes) -> WindowUsage {
        let tenant = self.tenants.get(directory);
        let used = tenant.and_then(|tenant| Some(self.gpus.get(&uuid)?.usage(tenant.id)));
        used.unwrap_or_default()
    }

    /// Returns the account of a grant, as last read.
    #[must_use]
    pub fn account(&self, directory: &Path) -> Option<&AccountSnapshot> {
        self.tenants.get(directory).map(|tenant| &tenant.snapshot)
    }

    /// Returns the grants with a process that waits until its memory has been measured.
    pub fn awaiting_measurement(&self) -> impl Iterator<Item = &Path> {
        self.tenants
            .iter()
            .filter(|(_, tenant)| tenant.snapshot.is_awaiting_measurement())
            .map(|(directory, _)| directory.as_path())
    }

    /// Reads the account of a grant and returns the memory of a GPU that its processes have charged.
    pub fn held(&mut self, directory: &Path, uuid: UuidBytes) -> Option<Bytes> {
        let tenant = self.tenants.get_mut(directory)?;
        let gpu = tenant.limits.slot_of(uuid)?;
        tenant.read();
        Some(tenant.snapshot.held(gpu))
    }

    /// Publishes the uncharged memory of a grant on a GPU: what was `measured` beyond what is `charged`.
    ///
    /// `charged` is the charge that [`Service::held`] returned at `at`, before the measurement. If
    /// the charge has changed since, the two values do not belong together and the measurement is
    /// ignored.
    pub fn record_measurement(
        &mut self,
        directory: &Path,
        uuid: UuidBytes,
        measured: Bytes,
        charged: Bytes,
        at: u64,
    ) {
        if self.held(directory, uuid) != Some(charged) {
            return;
        }
        if let Some(tenant) = self.tenants.get(directory)
            && let Some(gpu) = tenant.limits.slot_of(uuid)
        {
            tenant.control.set_uncharged(gpu, measured - charged, at);
        }
    }

    /// Returns the arbiter of a GPU, for its busy time and power factor.
    pub fn gpu_mut(&mut self, uuid: UuidBytes) -> Option<&mut GpuArbiter<u64>> {
        self.gpus.get_mut(&uuid)
    }

    /// Returns the GPUs with shares of throughput, whose power must be sampled, and their busy time
    /// in nanoseconds.
    pub fn throughput_gpus(&self) -> impl Iterator<Item = (UuidBytes, u64)> {
        self.gpus.iter().filter(|(_, gpu)| gpu.shares_throughput()).map(|(uuid, gpu)| (*uuid, gpu.busy()))
    }

    /// Returns what each grant has used of each of its GPUs.
    pub fn all_usage(&self) -> impl Iterator<Item = (&Path, UuidBytes, WindowUsage)> {
        self.tenants.iter().flat_map(|(directory, tenant)| {
            let uuids = tenant.limits.gpus.iter().map(|gpu| gpu.uuid);
            uuids.map(|uuid| (directory.as_path(), uuid, self.usage(directory, uuid)))
        })
    }

    /// Reads all demand and writes all windows. Returns the time of the next step, unless a wake-up
    /// arrives earlier.
    pub fn step(&mut self, now: u64) -> u64 {
        let mut changed = Vec::new();
        for tenant in self.tenants.values_mut() {
            tenant.control.write_heartbeat(now);
            if !tenant.is_unchanged(now) {
                tenant.read();
                tenant.read_at = Some(now);
            }
            let revision = tenant.control.revision();
            if revision != tenant.revision
                && let Ok(limits) = tenant.control.read()
            {
                (tenant.revision, tenant.limits) = (revision, limits.clone());
                changed.push((tenant.id, limits));
            }
        }
        for (id, limits) in changed {
            self.set_shares(id, &limits);
        }
        let mut next = now + IDLE_POLL_INTERVAL_NS;
        for (uuid, gpu) in &mut self.gpus {
            let find = |id: u64| {
                let tenant = self.tenants.values().find(|tenant| tenant.id == id)?;
                Some((tenant, tenant.limits.slot_of(*uuid)?))
            };
            let actions = gpu.step(now, |id| {
                let Some((tenant, slot)) = find(id) else { return TenantReport::default() };
                let number = tenant.control.window(slot).number.load(Ordering::Relaxed);
                let WindowDemand { wanting, drained } = tenant.snapshot.demand(slot, number);
                TenantReport { wanting, drained, busy_ns: tenant.snapshot.busy(slot) }
            });
            for action in actions {
                let (WindowAction::Open { tenant: id, deadline }
                | WindowAction::SetDeadline { tenant: id, deadline }) = action;
                let Some((tenant, slot)) = find(id) else { continue };
                let window = tenant.control.window(slot);
                match action {
                    WindowAction::Open { .. } => {
                        window.open(deadline);
                    }
                    WindowAction::SetDeadline { .. } => window.set_deadline(deadline),
                }
                futex::wake(&window.change);
            }
            if let Some(step_at) = gpu.next_step_at(now) {
                next = next.min(step_at).min(now + BUSY_POLL_INTERVAL_NS);
            }
        }
        next
    }

    /// Sleeps until a container sends a wake-up, but not beyond `end`.
    pub fn wait(&mut self, end: u64) {
        let begin = futex::now();
        let mut pipes: Vec<libc::pollfd> = Vec::with_capacity(self.tenants.len());
        for tenant in self.tenants.values_mut() {
            if begin - tenant.wakeups.0 > SECOND_NS {
                tenant.wakeups = (begin, 0);
            }
            if tenant.wakeups.1 < MAX_WAKEUPS_PER_SECOND {
                pipes.push(libc::pollfd {
                    fd: tenant.wakeup_pipe.as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                });
            }
        }
        if futex::poll(&mut pipes, end.saturating_sub(begin)) {
            let mut bytes = [0; 512];
            for tenant in self.tenants.values_mut() {
                // Bytes beyond the buffer stay in the pipe and are read next time.
                let wakeups = tenant.wakeup_pipe.read(&mut bytes).unwrap_or(0);
                if wakeups > 0 {
                    tenant.read_at = None;
                }
                tenant.wakeups.1 =
                    tenant.wakeups.1.saturating_add(u32::try_from(wakeups).unwrap_or(u32::MAX));
            }
            futex::sleep((begin + MIN_STEP_INTERVAL_NS).saturating_sub(futex::now()));
        }
    }

    fn set_shares(&mut self, id: u64, limits: &GrantLimits) {
        for (uuid, share) in shares(limits) {
            self.gpus.entry(uuid).or_default().set(id, share);
        }
    }
}

impl Tenant {
    /// Returns whether the account need not be read again: the container wanted nothing and has
    /// sent no wake-up since.
    fn is_unchanged(&self, now: u64) -> bool {
        self.read_at.is_some_and(|read| now.saturating_sub(read) < QUIET_ACCOUNT_INTERVAL_NS)
            && self.snapshot.is_idle()
    }

    fn read(&mut self) {
        self.snapshot.read(|bytes, offset| self.account.read_at(bytes, offset));
    }
}

/// Returns the share of each GPU.
fn shares(limits: &GrantLimits) -> impl Iterator<Item = (UuidBytes, Share)> {
    let by_throughput = limits.meaning == ShareMeaning::Throughput;
    limits.gpus.iter().map(move |gpu| {
        (
            gpu.uuid,
            Share {
                compute_percent: gpu.compute_percent,
                compute_ceiling_percent: gpu.compute_ceiling_percent,
                by_throughput,
            },
        )
    })
}
