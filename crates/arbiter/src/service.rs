//! The arbiter over files: reads demands, writes windows.

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
use tessera_limits::memory_account::AccountSnapshot;
use tessera_limits::{GrantLimits, UuidBytes, futex};

use crate::gpu_arbiter::{GpuArbiter, Share, TenantReport, WindowAction, WindowUsage};

/// How long nothing is looked at though no bell rings: a bell may be out of a container's reach. While a container wants
/// a GPU,
const BUSY_LOOK: u64 = 10_000_000;
/// and while none does. Far below the time after which the arbiter is taken for gone.
const IDLE_LOOK: u64 = 50_000_000;
/// How long the account of a container that wants nothing is not read again, though others are.
const QUIET_LOOK: u64 = 400_000_000;

/// Bells are answered this often at most, all together,
const ANSWER: u64 = 50_000;
/// and of one container so many in a second: one that only rings is no longer heard until the next.
const RINGS: u32 = 4_000;
const SECOND: u64 = 1_000_000_000;

/// All grants of a node, and the GPUs they share.
#[derive(Debug, Default)]
pub struct Service {
    tenants: HashMap<PathBuf, Tenant>,
    gpus: HashMap<UuidBytes, GpuArbiter<u64>>,
    next: u64,
}

/// One grant. The account is only ever read, never mapped: a container that cuts its file short would otherwise end us.
#[derive(Debug)]
struct Tenant {
    id: u64,
    control: OwnedMapping<Control>,
    account: File,
    bell: File,
    /// Rings heard since a point in time.
    rings: (u64, u32),
    limits: GrantLimits,
    turn: u64,
    demands: AccountSnapshot,
    /// When it was last read, unless it has rung since.
    read: Option<u64>,
}

impl Service {
    /// Takes a grant in, by its folder.
    ///
    /// # Errors
    /// When its files cannot be used.
    pub fn add(&mut self, folder: &Path) -> io::Result<()> {
        let control = files::open_control_writable(folder)?;
        let limits = control
            .read()
            .map_err(|damage| io::Error::new(io::ErrorKind::InvalidData, damage.to_string()))?;
        let (account, bell) = (File::open(files::account_path(folder))?, files::open_wakeup_pipe(folder)?);
        self.next += 1;
        let (id, turn, demands) = (self.next, control.revision(), AccountSnapshot::default());
        self.gpus_of(id, &limits);
        let read = None;
        let tenant = Tenant { id, control, account, bell, rings: (0, 0), limits, turn, demands, read };
        self.tenants.insert(folder.into(), tenant);
        Ok(())
    }

    /// A grant has ended.
    pub fn remove(&mut self, folder: &Path) {
        if let Some(tenant) = self.tenants.remove(folder) {
            self.gpus.values_mut().for_each(|gpu| gpu.remove(tenant.id));
        }
    }

    /// What a grant has had of a GPU.
    #[must_use]
    pub fn usage(&self, folder: &Path, uuid: UuidBytes) -> WindowUsage {
        let tenant = self.tenants.get(folder);
        let used = tenant.and_then(|tenant| Some(self.gpus.get(&uuid)?.usage(tenant.id)));
        used.unwrap_or_default()
    }

    /// What the processes of a grant tell of themselves, as last read.
    #[must_use]
    pub fn demands(&self, folder: &Path) -> Option<&AccountSnapshot> {
        self.tenants.get(folder).map(|tenant| &tenant.demands)
    }

    /// The grants with a process that waits until what it holds has been measured.
    pub fn awaiting_measurement(&self) -> impl Iterator<Item = &Path> {
        self.tenants
            .iter()
            .filter(|(_, tenant)| tenant.demands.is_awaiting_measurement())
            .map(|(folder, _)| folder.as_path())
    }

    /// What the processes of a grant hold of a GPU by their ledgers, now.
    pub fn held(&mut self, folder: &Path, uuid: UuidBytes) -> Option<u64> {
        let tenant = self.tenants.get_mut(folder)?;
        let gpu = tenant.limits.slot_of(uuid)?;
        tenant.read();
        Some(tenant.demands.held(gpu))
    }

    /// The processes of a grant hold `bytes` of a GPU, measured since `at`, when they held `before` by their ledgers: what is
    /// beyond counts too. Where the ledgers have moved since, nobody knows what goes with what.
    pub fn measured(&mut self, folder: &Path, uuid: UuidBytes, bytes: u64, before: u64, at: u64) {
        if self.held(folder, uuid) != Some(before) {
            return;
        }
        if let Some(tenant) = self.tenants.get(folder)
            && let Some(gpu) = tenant.limits.slot_of(uuid)
        {
            tenant.control.set_uncharged(gpu, bytes.saturating_sub(before), at);
        }
    }

    /// A GPU, for its busy time and power factor.
    pub fn gpu_mut(&mut self, uuid: UuidBytes) -> Option<&mut GpuArbiter<u64>> {
        self.gpus.get_mut(&uuid)
    }

    /// The GPUs where throughput is shared, so that their power matters.
    pub fn throughput_gpus(&self) -> impl Iterator<Item = (UuidBytes, u64)> {
        self.gpus.iter().filter(|(_, gpu)| gpu.shares_throughput()).map(|(uuid, gpu)| (*uuid, gpu.busy()))
    }

    /// The GPUs of a grant, and what it has had of each.
    pub fn all_usage(&self) -> impl Iterator<Item = (&Path, UuidBytes, WindowUsage)> {
        self.tenants.iter().flat_map(|(folder, tenant)| {
            let uuids = tenant.limits.gpus.iter().map(|gpu| gpu.uuid);
            uuids.map(|uuid| (folder.as_path(), uuid, self.usage(folder, uuid)))
        })
    }

    /// Looks once at everything; returns when to look again though nobody rings.
    pub fn step(&mut self, now: u64) -> u64 {
        let mut changed = Vec::new();
        for tenant in self.tenants.values_mut() {
            tenant.control.write_heartbeat(now);
            if !tenant.is_quiet(now) {
                tenant.read();
                tenant.read = Some(now);
            }
            let turn = tenant.control.revision();
            if turn != tenant.turn
                && let Ok(limits) = tenant.control.read()
            {
                (tenant.turn, tenant.limits) = (turn, limits.clone());
                changed.push((tenant.id, limits));
            }
        }
        for (id, limits) in changed {
            self.gpus_of(id, &limits);
        }
        let mut next = now + IDLE_LOOK;
        for (uuid, gpu) in &mut self.gpus {
            let find = |id: u64| {
                let tenant = self.tenants.values().find(|tenant| tenant.id == id)?;
                Some((tenant, tenant.limits.slot_of(*uuid)?))
            };
            let acts = gpu.step(now, |id| {
                let Some((tenant, place)) = find(id) else { return TenantReport::default() };
                let number = tenant.control.window(place).number.load(Ordering::Relaxed);
                let (wanting, drained) = tenant.demands.of(place, number);
                TenantReport { wanting, drained, busy_ns: tenant.demands.busy(place) }
            });
            for act in acts {
                let (WindowAction::Open { tenant: id, deadline }
                | WindowAction::SetDeadline { tenant: id, deadline }) = act;
                let Some((tenant, place)) = find(id) else { continue };
                let window = tenant.control.window(place);
                match act {
                    WindowAction::Open { .. } => {
                        window.open(deadline);
                    }
                    WindowAction::SetDeadline { .. } => window.set_deadline(deadline),
                }
                futex::wake(&window.change);
            }
            if let Some(look) = gpu.next_step_at(now) {
                next = next.min(look).min(now + BUSY_LOOK);
            }
        }
        next
    }

    /// Sleeps until a container rings, at the longest until `end`.
    pub fn wait(&mut self, end: u64) {
        let begin = futex::now();
        let mut heard: Vec<libc::pollfd> = Vec::with_capacity(self.tenants.len());
        for tenant in self.tenants.values_mut() {
            if begin - tenant.rings.0 > SECOND {
                tenant.rings = (begin, 0);
            }
            if tenant.rings.1 < RINGS {
                heard.push(libc::pollfd { fd: tenant.bell.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            }
        }
        if futex::poll(&mut heard, end.saturating_sub(begin)) {
            let mut bytes = [0; 512];
            for tenant in self.tenants.values_mut() {
                // What is left stays readable and is heard next time.
                let rings = tenant.bell.read(&mut bytes).unwrap_or(0);
                if rings > 0 {
                    tenant.read = None;
                }
                tenant.rings.1 = tenant.rings.1.saturating_add(u32::try_from(rings).unwrap_or(u32::MAX));
            }
            futex::sleep((begin + ANSWER).saturating_sub(futex::now()));
        }
    }

    fn gpus_of(&mut self, id: u64, limits: &GrantLimits) {
        for (uuid, share) in shares(limits) {
            self.gpus.entry(uuid).or_default().set(id, share);
        }
    }
}

impl Tenant {
    /// Whether there is no news to be expected: it wanted nothing when last read, and would have rung.
    fn is_quiet(&self, now: u64) -> bool {
        self.read.is_some_and(|read| now.saturating_sub(read) < QUIET_LOOK) && self.demands.is_idle()
    }

    fn read(&mut self) {
        self.demands.read(|bytes, place| self.account.read_at(bytes, place));
    }
}

/// The share of each GPU.
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
