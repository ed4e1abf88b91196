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
use tessera_limits::{Bytes, GpuSlot, GrantLimits, MAX_GPUS, UuidBytes, futex};

use crate::gpu_arbiter::{GpuArbiter, Share, TenantReport, WindowAction, WindowUsage};
use crate::rate_limit::RateLimit;
use crate::read_schedule::ReadSchedule;

/// Interval in nanoseconds between two steps while a container wants a GPU. The arbiter polls,
/// because a container may be unable to reach its wake-up pipe.
const BUSY_POLL_INTERVAL_NS: u64 = 10_000_000;
/// Interval in nanoseconds between two steps while no container wants a GPU. Far below the
/// heartbeat timeout.
const IDLE_POLL_INTERVAL_NS: u64 = 50_000_000;

/// Shortest interval in nanoseconds between two steps, however many wake-ups arrive.
const MIN_STEP_INTERVAL_NS: u64 = 50_000;
/// Number of wake-ups of one container per second that the arbiter follows. A process sends one for each
/// report, at most about one per millisecond.
const MAX_WAKEUPS_PER_SECOND: u64 = 1_000;

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
    wakeups: RateLimit,
    reads: ReadSchedule,
    limits: GrantLimits,
    revision: u64,
    snapshot: AccountSnapshot,
    /// The reports on each GPU since the last read, with the number of the window they are about.
    reports: [Option<(u32, TenantReport)>; MAX_GPUS],
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
            wakeups: RateLimit::per_second(MAX_WAKEUPS_PER_SECOND),
            reads: ReadSchedule::default(),
            limits,
            revision,
            snapshot: AccountSnapshot::default(),
            reports: [None; MAX_GPUS],
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

    /// Sets the grants whose processes are all stopped.
    pub fn set_stopped(&mut self, is_stopped: impl Fn(&Path) -> bool) {
        for (directory, tenant) in &self.tenants {
            let is_stopped = is_stopped(directory);
            self.gpus.values_mut().for_each(|gpu| gpu.set_stopped(tenant.id, is_stopped));
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
            if tenant.reads.is_due(now, tenant.snapshot.is_idle()) {
                tenant.read();
                tenant.reads.record(now, tenant.snapshot.slot_count());
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
            let tenants = self.tenants.values_mut();
            let reports: HashMap<u64, TenantReport> = tenants
                .filter_map(|tenant| Some((tenant.id, tenant.report(tenant.limits.slot_of(*uuid)?))))
                .collect();
            let actions = gpu.step(now, |id| reports.get(&id).copied().unwrap_or_default());
            let find = |id: u64| {
                let tenant = self.tenants.values().find(|tenant| tenant.id == id)?;
                Some((tenant, tenant.limits.slot_of(*uuid)?))
            };
            for action in actions {
                let WindowAction { tenant: id, is_new, deadline, queue_limit_ns } = action;
                let Some((tenant, slot)) = find(id) else { continue };
                let window = tenant.control.window(slot);
                window.set_queue_limit(queue_limit_ns);
                if is_new {
                    window.open(deadline);
                } else {
                    window.set_deadline(deadline);
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
        let (mut listened, mut pipes, mut end) = (Vec::new(), Vec::new(), end);
        for tenant in self.tenants.values_mut() {
            if tenant.wakeups.is_open(begin) {
                let fd = tenant.wakeup_pipe.as_raw_fd();
                pipes.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
                listened.push(tenant);
            } else {
                end = end.min(tenant.wakeups.opens_at());
            }
        }
        if futex::poll(&mut pipes, end.saturating_sub(begin)) {
            let now = futex::now();
            let mut bytes = [0; 4096];
            let woken = listened.iter_mut().zip(&pipes).filter(|(_, pipe)| pipe.revents != 0);
            for (tenant, _) in woken {
                // Bytes beyond the buffer stay in the pipe and are read next time.
                let _ = tenant.wakeup_pipe.read(&mut bytes);
                tenant.wakeups.charge(now, 1);
                tenant.reads.wake();
            }
            futex::sleep((begin + MIN_STEP_INTERVAL_NS).saturating_sub(now));
        }
    }

    fn set_shares(&mut self, id: u64, limits: &GrantLimits) {
        for (uuid, share) in shares(limits) {
            self.gpus.entry(uuid).or_default().set(id, share);
        }
    }
}

impl Tenant {
    fn read(&mut self) {
        self.snapshot.read(|bytes, offset| self.account.read_at(bytes, offset));
        self.reports = [None; MAX_GPUS];
    }

    /// Returns what the container reports about a GPU and the current window there, as last read.
    fn report(&mut self, gpu: GpuSlot) -> TenantReport {
        let number = self.control.window(gpu).number.load(Ordering::Relaxed);
        match self.reports[gpu.index()] {
            Some((reported, report)) if reported == number => report,
            _ => {
                let WindowDemand { wanting, drained } = self.snapshot.demand(gpu, number);
                let report = TenantReport { wanting, drained, busy_ns: self.snapshot.busy(gpu) };
                self.reports[gpu.index()] = Some((number, report));
                report
            }
        }
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
