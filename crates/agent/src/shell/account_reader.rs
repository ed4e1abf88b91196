//! Reads the account files of containers once a second on a separate thread: memory held by their processes, time
//! throttled, and allocations rejected.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use tessera_arbiter::gpu_arbiter::WindowUsage;
use tessera_core::gpu::GpuUuid;
use tessera_limits::{
    Bytes, Control, GpuSlot, PerGpu, UuidBytes,
    allocation_size::DEFAULT_CONTEXT,
    files::{self, OwnedMapping},
    futex,
    memory_account::{AccountSnapshot, ProcessUsage},
};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages, Sampler, account_file, arbiter::Arbiter, arbiter_watch::ArbiterWatch};
use crate::{
    controller::{AccountSample, Event, PodContainer, UsageSample},
    controller::{GpuProcess, ProcessState},
    exporter::{ContainerKey, ShareReport, ShareReports},
};

/// Time between two reads of all accounts.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Handle of the reading thread.
#[derive(Clone, Debug)]
pub(super) struct AccountReader(mpsc::Sender<Command>);

#[derive(Debug)]
enum Command {
    Add(PodContainer, PathBuf),
    Remove(PathBuf),
    SetUncharged {
        container: PodContainer,
        gpu: usize,
        bytes: u64,
        at: u64,
    },
    /// Measures now, because a process near its limit waits for the result.
    Measure,
}

/// Account file of one container.
#[derive(Debug)]
struct Account {
    directory: PathBuf,
    file: File,
    /// Mapping used to publish uncharged memory to the container. It is open only while the container has processes
    /// or uncharged memory.
    control: Option<OwnedMapping<Control>>,
    /// GPUs of the grant. Empty if the control file is damaged, until it is written again.
    gpus: Vec<GpuUuid>,
    contents: AccountSnapshot,
    totals: ProcessTotals,
    /// Number of times that the file was larger than an account.
    overruns: u64,
    /// Size in bytes at which the file was cut since the last report.
    overrun: Option<u64>,
}

/// Totals of a container's processes. They only grow, although the slots of ended processes are reused.
#[derive(Debug, Default, PartialEq, Eq)]
struct ProcessTotals {
    waited: u64,
    waits: u64,
    denied: Bytes,
    before: Vec<Option<ProcessUsage>>,
}

impl AccountReader {
    pub(super) fn start(
        sampler: Arc<Sampler>,
        arbiter: Arbiter,
        messages: Messages,
        stop: CancellationToken,
    ) -> io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let requests = commands.clone();
        arbiter.on_measure_request(move || {
            let _ended = requests.send(Command::Measure);
        });
        let read = move || {
            let (mut accounts, mut watch) = (BTreeMap::new(), ArbiterWatch::default());
            let mut next = Instant::now() + READ_INTERVAL;
            while !stop.is_cancelled() {
                match inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
                    Ok(Command::Measure) => measure(&mut accounts, &mut watch, &sampler, &arbiter, &messages),
                    Ok(command) => handle(&mut accounts, command),
                    Err(RecvTimeoutError::Timeout) => {
                        next = Instant::now() + READ_INTERVAL;
                        measure(&mut accounts, &mut watch, &sampler, &arbiter, &messages);
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        };
        thread::Builder::new().name("accounts".into()).spawn(read)?;
        Ok(Self(commands))
    }

    /// Starts to read the account of a container. A container that restarts has a new account.
    pub(super) fn add(&self, container: PodContainer, directory: PathBuf) {
        let _ended = self.0.send(Command::Add(container, directory));
    }

    pub(super) fn remove(&self, directory: PathBuf) {
        let _ended = self.0.send(Command::Remove(directory));
    }

    /// Publishes to a container how much memory its account lacks, measured at `at`.
    pub(super) fn set_uncharged(&self, container: PodContainer, gpu: usize, bytes: u64, at: u64) {
        let _ended = self.0.send(Command::SetUncharged { container, gpu, bytes, at });
    }
}

fn handle(accounts: &mut BTreeMap<PodContainer, Account>, command: Command) {
    match command {
        Command::Add(container, directory) => match Account::open(&directory) {
            Ok(account) => {
                accounts.insert(container, account);
            }
            Err(error) => {
                tracing::warn!(directory = %directory.display(), %error, "cannot read the account file of this grant; its usage is not reported");
            }
        },
        Command::Remove(directory) => accounts.retain(|_, account| account.directory != directory),
        Command::SetUncharged { container, gpu, bytes, at } => {
            let control = accounts.get_mut(&container).and_then(Account::control);
            if let Some((control, gpu)) = control.zip(GpuSlot::new(gpu)) {
                control.set_uncharged(gpu, Bytes(bytes), at);
            }
        }
        Command::Measure => {}
    }
}

fn measure(
    accounts: &mut BTreeMap<PodContainer, Account>,
    watch: &mut ArbiterWatch,
    sampler: &Sampler,
    arbiter: &Arbiter,
    messages: &Messages,
) {
    let at = futex::now();
    let mut required = BTreeSet::new();
    for account in accounts.values_mut() {
        account.read();
        if account.is_in_use() {
            required.extend(account.gpus.iter().cloned());
        }
    }
    let (sampled_gpus, processes) = sampler.container_processes(&required);
    let on_gpus: BTreeSet<&PodContainer> = processes.iter().map(|process| &process.container).collect();
    let is_running = |process: &&GpuProcess| process.state != ProcessState::Stopped;
    let running: BTreeSet<&PodContainer> =
        processes.iter().filter(is_running).map(|process| &process.container).collect();
    let is_stopped = |container: &PodContainer| on_gpus.contains(container) && !running.contains(container);
    let stopped = accounts.iter().filter(|(container, _)| is_stopped(container));
    arbiter.set_stopped(stopped.map(|(_, account)| account.directory.clone()).collect());
    let used = arbiter.used();
    let mut reports = ShareReports::new();
    let mut read = Vec::new();
    for (whose, account) in accounts {
        if let Some(bytes) = account.overrun.take() {
            let _ended = messages.send(Message::Event(Event::AccountFileGrew(whose.clone(), bytes)));
        }
        if account.is_in_use() || on_gpus.contains(whose) {
            read.push(account.compare(whose));
        }
        for (place, gpu) in account.gpus.iter().enumerate() {
            let uuid = UuidBytes::parse(&gpu.0).unwrap_or_default();
            let WindowUsage { busy_ns, open_ns, windows } =
                used.all.get(&(account.directory.clone(), uuid)).copied().unwrap_or_default();
            let (uid, container) = whose.clone();
            let mut report = ShareReport {
                window_seconds: seconds(open_ns),
                busy_seconds: seconds(busy_ns),
                windows,
                ..ShareReport::default()
            };
            // Processes do not report for which GPU they waited. Shares are of one GPU, so the first is right.
            if place == 0 {
                let ProcessTotals { waited, waits, denied, .. } = &account.totals;
                report = ShareReport {
                    throttled_seconds: seconds(*waited),
                    waits: *waits,
                    denied_bytes: denied.0,
                    account_overruns: account.overruns,
                    ..report
                };
            }
            reports.insert((ContainerKey { uid, container }, gpu.clone()), report);
        }
    }
    sampler.report(reports, Duration::from_nanos(futex::now().saturating_sub(used.at)));
    let is_steady = watch.is_steady(futex::now(), used.at);
    let times = if is_steady { sampler.container_times() } else { Vec::new() };
    let sample = UsageSample { at, sampled_gpus, processes, times, accounts: read };
    let _ended = messages.send(Message::Event(Event::UsageSampled(Box::new(sample))));
}

fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

impl Account {
    fn open(directory: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(files::account_path(directory))?;
        let mut account = Self {
            directory: directory.to_owned(),
            file,
            control: None,
            gpus: Vec::new(),
            contents: AccountSnapshot::default(),
            totals: ProcessTotals::default(),
            overruns: 0,
            overrun: None,
        };
        account.read();
        Ok(account)
    }

    /// Reads the account file. Closes the control mapping when the container has no processes and no uncharged
    /// memory.
    fn read(&mut self) {
        if let Some(bytes) = account_file::cut(&self.file) {
            self.overruns += 1;
            self.overrun = Some(bytes);
        }
        self.contents.read(|bytes, place| self.file.read_at(bytes, place));
        self.totals.add(self.contents.process_usage());
        if self.gpus.is_empty()
            && let Some(Ok(limits)) = self.control().map(|control| control.read())
        {
            self.gpus = limits.gpus.iter().map(|gpu| gpu.uuid.to_string().as_str().into()).collect();
        }
        let has_uncharged =
            |control: &OwnedMapping<Control>| GpuSlot::all().any(|gpu| control.uncharged(gpu) > Bytes::ZERO);
        if self.totals.processes().next().is_none() && !self.control.as_ref().is_some_and(has_uncharged) {
            self.control = None;
        }
    }

    fn control(&mut self) -> Option<&OwnedMapping<Control>> {
        if self.control.is_none() {
            self.control = files::open_control_writable(&self.directory).ok();
        }
        self.control.as_ref()
    }

    /// Returns whether the container has processes, or has published uncharged memory that may be outdated.
    fn is_in_use(&self) -> bool {
        self.control.is_some() || self.totals.processes().next().is_some()
    }

    /// Reads the account again and returns the memory held on each GPU, or `None` where it changed since the last
    /// read.
    fn compare(&mut self, container: &PodContainer) -> AccountSample {
        let (before, contexts_before) = (self.totals.held(), self.totals.context_only());
        self.read();
        let (after, contexts) = (self.totals.held(), self.totals.context_only());
        let held = after.iter().zip(&before);
        AccountSample {
            container: container.clone(),
            processes: self.totals.processes().collect(),
            ended: self.totals.ended().collect(),
            held: held
                .take(self.gpus.len())
                .map(|(after, before)| (after == before).then_some(after.0))
                .collect(),
            context_only: contexts.intersection(&contexts_before).copied().collect(),
        }
    }
}

impl ProcessTotals {
    fn living(&self) -> impl Iterator<Item = &ProcessUsage> {
        self.before.iter().flatten().filter(|usage| usage.is_alive)
    }

    /// Returns the PIDs of the living processes inside the container.
    fn processes(&self) -> impl Iterator<Item = u32> {
        self.living().map(|usage| usage.process)
    }

    /// Returns the PIDs of ended processes whose memory may not be released yet.
    fn ended(&self) -> impl Iterator<Item = u32> {
        self.before.iter().flatten().filter(|usage| !usage.is_alive).map(|usage| usage.process)
    }

    /// Returns the memory that living processes hold on each GPU.
    fn held(&self) -> PerGpu<Bytes> {
        PerGpu::from_fn(|gpu| self.living().map(|usage| usage.held[gpu]).sum())
    }

    /// Returns the processes that wait for a measurement and are charged for one context of a GPU and
    /// nothing else, with the place of the GPU. The charge shows that the size is not known yet.
    fn context_only(&self) -> BTreeSet<(u32, usize)> {
        let waiting = self.living().filter(|usage| usage.is_awaiting_measurement);
        let gpus = waiting.flat_map(|usage| GpuSlot::all().map(move |gpu| (usage, gpu)));
        gpus.filter(|(usage, gpu)| usage.held[*gpu] == DEFAULT_CONTEXT)
            .map(|(usage, gpu)| (usage.process, gpu.index()))
            .collect()
    }

    /// Adds the growth of all slots since the last call.
    fn add(&mut self, slots: impl Iterator<Item = Option<ProcessUsage>>) {
        let before = std::mem::take(&mut self.before);
        for (place, now) in slots.enumerate() {
            if let Some(now) = now {
                let known = before.get(place).copied().flatten().filter(|known| known.process == now.process);
                let known = known.unwrap_or_default();
                let more = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
                self.waited = self.waited.saturating_add(more(now.waited, known.waited));
                self.waits = self.waits.saturating_add(more(now.waits, known.waits));
                self.denied += Bytes(more(now.denied.0, known.denied.0));
            }
            self.before.push(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(process: u32, waited: u64, denied: u64) -> Option<ProcessUsage> {
        Some(ProcessUsage {
            process,
            is_alive: true,
            waited,
            waits: waited,
            denied: Bytes(denied),
            ..ProcessUsage::default()
        })
    }

    #[test]
    fn counts_only_memory_of_living_processes() {
        let mut totals = ProcessTotals::default();
        let holds = |process, is_alive, bytes| {
            let mut held = PerGpu::default();
            held[GpuSlot::FIRST] = Bytes(bytes);
            Some(ProcessUsage { process, is_alive, held, ..ProcessUsage::default() })
        };
        totals.add([holds(1, false, 528), None, holds(2, true, 100), holds(3, true, 10)].into_iter());
        assert_eq!(totals.held()[GpuSlot::FIRST], Bytes(110));
        assert_eq!(totals.processes().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(totals.ended().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn keeps_totals_and_never_counts_twice() {
        let mut totals = ProcessTotals::default();
        let mut add = |slots: &[Option<ProcessUsage>]| {
            totals.add(slots.iter().copied());
            (totals.waited, totals.waits, totals.denied.0)
        };
        assert_eq!(add(&[usage(1, 10, 5), usage(2, 1, 0)]), (11, 11, 5));
        assert_eq!(add(&[usage(1, 15, 5), usage(2, 1, 0)]), (16, 16, 5));
        assert_eq!(add(&[None, usage(2, 1, 0)]), (16, 16, 5), "the process ended");
        assert_eq!(add(&[usage(3, 20, 1), usage(2, 1, 0)]), (36, 36, 6), "another process in the slot");
        assert_eq!(add(&[usage(3, 2, 1), usage(2, 1, 0)]), (38, 38, 6), "another process of the same number");
        assert_eq!(
            add(&[usage(9, u64::MAX, 0)]),
            (u64::MAX, u64::MAX, 6),
            "implausible values do not overflow"
        );
    }
}
