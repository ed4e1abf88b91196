//! The books that containers keep, read once a second on a thread of their own: what their processes hold, how long they waited,
//! what they were refused.

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
    Control, GpuSlot, PerGpu, UuidBytes,
    files::{self, OwnedMapping},
    futex,
    memory_account::{AccountSnapshot, MemoryAccount, ProcessUsage},
};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages, Sampler, arbiter::Arbiter};
use crate::{
    controller::{AccountSample, Event, PodContainer, UsageSample},
    exporter::{ContainerKey, ShareReport, ShareReports},
};

/// How often they are read.
const EVERY: Duration = Duration::from_secs(1);

/// The thread, as the rest of the agent knows it.
#[derive(Clone, Debug)]
pub(super) struct AccountReader(mpsc::Sender<Command>);

#[derive(Debug)]
enum Command {
    Add(PodContainer, PathBuf),
    Remove(PathBuf),
    Unledgered {
        whose: PodContainer,
        card: usize,
        bytes: u64,
        at: u64,
    },
    /// A process near its limit waits until what it holds has been measured.
    Measure,
}

/// The books of one container.
#[derive(Debug)]
struct Account {
    directory: PathBuf,
    file: File,
    /// Where the container is told what its books lack, while there is somebody to be told.
    control: Option<OwnedMapping<Control>>,
    /// The GPUs of its grant; empty where that is damaged, and so will be written anew.
    cards: Vec<GpuUuid>,
    demands: AccountSnapshot,
    tally: Tally,
}

/// What the processes of a container went through, so far. Only ever grows, though their slots are used again.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    waited: u64,
    waits: u64,
    denied: u64,
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
        let hurry = commands.clone();
        arbiter.on_unsure(move || {
            let _ended = hurry.send(Command::Measure);
        });
        let read = move || {
            let mut accounts = BTreeMap::new();
            let mut next = Instant::now() + EVERY;
            while !stop.is_cancelled() {
                match inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
                    Ok(Command::Measure) => measure(&mut accounts, &sampler, &arbiter, &messages),
                    Ok(command) => obey(&mut accounts, command),
                    Err(RecvTimeoutError::Timeout) => {
                        next = Instant::now() + EVERY;
                        measure(&mut accounts, &sampler, &arbiter, &messages);
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        };
        thread::Builder::new().name("accounts".into()).spawn(read)?;
        Ok(Self(commands))
    }

    /// A container has its grant there. One that starts again has other books.
    pub(super) fn add(&self, whose: PodContainer, directory: PathBuf) {
        let _ended = self.0.send(Command::Add(whose, directory));
    }

    pub(super) fn remove(&self, directory: PathBuf) {
        let _ended = self.0.send(Command::Remove(directory));
    }

    pub(super) fn set_unledgered(&self, whose: PodContainer, card: usize, bytes: u64, at: u64) {
        let _ended = self.0.send(Command::Unledgered { whose, card, bytes, at });
    }
}

fn obey(accounts: &mut BTreeMap<PodContainer, Account>, command: Command) {
    match command {
        Command::Add(whose, directory) => match Account::open(&directory) {
            Ok(account) => {
                accounts.insert(whose, account);
            }
            Err(error) => {
                tracing::warn!(directory = %directory.display(), %error, "the books of this grant are not read");
            }
        },
        Command::Remove(directory) => accounts.retain(|_, account| account.directory != directory),
        Command::Unledgered { whose, card, bytes, at } => {
            let control = accounts.get_mut(&whose).and_then(Account::control);
            if let Some((control, card)) = control.zip(GpuSlot::new(card)) {
                control.set_uncharged(card, bytes, at);
            }
        }
        Command::Measure => {}
    }
}

fn measure(
    accounts: &mut BTreeMap<PodContainer, Account>,
    sampler: &Sampler,
    arbiter: &Arbiter,
    messages: &Messages,
) {
    let at = futex::now();
    let mut wanted = BTreeSet::new();
    for account in accounts.values_mut() {
        account.read();
        if account.is_in_use() {
            wanted.extend(account.cards.iter().cloned());
        }
    }
    let (sampled_gpus, processes) = sampler.on_cards(&wanted);
    let on_cards: BTreeSet<&PodContainer> = processes.iter().map(|process| &process.container).collect();
    let used = arbiter.used();
    let mut throttles = ShareReports::new();
    let mut read = Vec::new();
    for (whose, account) in accounts {
        if account.is_in_use() || on_cards.contains(whose) {
            read.push(account.compare(whose));
        }
        for (place, gpu) in account.cards.iter().enumerate() {
            let uuid = UuidBytes::parse(&gpu.0).unwrap_or_default();
            let WindowUsage { time_ns: time, windows } =
                used.all.get(&(account.directory.clone(), uuid)).copied().unwrap_or_default();
            let (uid, container) = whose.clone();
            let mut throttle = ShareReport { open: seconds(time), windows, ..ShareReport::default() };
            // Processes do not tell which GPU they waited for; shares are of one GPU.
            if place == 0 {
                let Tally { waited, waits, denied, .. } = &account.tally;
                throttle = ShareReport {
                    seconds: seconds(*waited),
                    waits: *waits,
                    denied_bytes: *denied,
                    ..throttle
                };
            }
            throttles.insert((ContainerKey { uid, container }, gpu.clone()), throttle);
        }
    }
    sampler.report(throttles, Duration::from_nanos(futex::now().saturating_sub(used.at)));
    let measured = UsageSample { at, sampled_gpus, processes, accounts: read };
    let _ended = messages.send(Message::Event(Event::UsageSampled(Box::new(measured))));
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
            cards: Vec::new(),
            demands: AccountSnapshot::default(),
            tally: Tally::default(),
        };
        account.read();
        Ok(account)
    }

    /// Reads the books. What is kept open for telling the container something is closed when nobody is left to hear it.
    fn read(&mut self) {
        let size = size_of::<MemoryAccount>() as u64;
        // The container can write what it likes, but not as much as it likes: the file is on the node's disk.
        if self.file.metadata().is_ok_and(|file| file.len() > size) {
            let _shorter = self.file.set_len(size);
        }
        self.demands.read(|bytes, place| self.file.read_at(bytes, place));
        self.tally.take(self.demands.process_usage());
        if self.cards.is_empty()
            && let Some(Ok(limits)) = self.control().map(|control| control.read())
        {
            self.cards = limits.gpus.iter().map(|card| card.uuid.to_string().as_str().into()).collect();
        }
        let is_told =
            |control: &OwnedMapping<Control>| GpuSlot::all().any(|card| control.uncharged(card) > 0);
        if self.tally.processes().next().is_none() && !self.control.as_ref().is_some_and(is_told) {
            self.control = None;
        }
    }

    fn control(&mut self) -> Option<&OwnedMapping<Control>> {
        if self.control.is_none() {
            self.control = files::open_control_writable(&self.directory).ok();
        }
        self.control.as_ref()
    }

    /// Whether a process keeps these books, or was told of something that may be over by now.
    fn is_in_use(&self) -> bool {
        self.control.is_some() || self.tally.processes().next().is_some()
    }

    /// What is held by the books, of the GPUs where that did not change since they were last read.
    fn compare(&mut self, whose: &PodContainer) -> AccountSample {
        let before = self.tally.held();
        self.read();
        let after = self.tally.held();
        let held = after.iter().zip(&before);
        AccountSample {
            container: whose.clone(),
            processes: self.tally.processes().collect(),
            ended: self.tally.ended().collect(),
            held: held
                .take(self.cards.len())
                .map(|(after, before)| (after == before).then_some(*after))
                .collect(),
        }
    }
}

impl Tally {
    fn living(&self) -> impl Iterator<Item = &ProcessUsage> {
        self.before.iter().flatten().filter(|said| said.is_alive)
    }

    /// The living processes, as the container numbers them.
    fn processes(&self) -> impl Iterator<Item = u32> {
        self.living().map(|said| said.process)
    }

    /// Those that have ended, and whose memory may not be back with the GPU yet.
    fn ended(&self) -> impl Iterator<Item = u32> {
        self.before.iter().flatten().filter(|said| !said.is_alive).map(|said| said.process)
    }

    /// Bytes of each GPU that the living hold.
    fn held(&self) -> PerGpu<u64> {
        PerGpu::from_fn(|card| self.living().fold(0, |sum: u64, said| sum.saturating_add(said.held[card])))
    }

    fn take(&mut self, slots: impl Iterator<Item = Option<ProcessUsage>>) {
        let before = std::mem::take(&mut self.before);
        for (place, now) in slots.enumerate() {
            if let Some(now) = now {
                let known = before.get(place).copied().flatten().filter(|known| known.process == now.process);
                let known = known.unwrap_or_default();
                let more = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
                self.waited = self.waited.saturating_add(more(now.waited, known.waited));
                self.waits = self.waits.saturating_add(more(now.waits, known.waits));
                self.denied = self.denied.saturating_add(more(now.denied, known.denied));
            }
            self.before.push(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(process: u32, waited: u64, denied: u64) -> Option<ProcessUsage> {
        Some(ProcessUsage {
            process,
            is_alive: true,
            waited,
            waits: waited,
            denied,
            ..ProcessUsage::default()
        })
    }

    #[test]
    fn only_the_living_hold_something() {
        let mut tally = Tally::default();
        let holds = |process, is_alive, bytes| {
            let mut held = PerGpu::default();
            held[GpuSlot::FIRST] = bytes;
            Some(ProcessUsage { process, is_alive, held, ..ProcessUsage::default() })
        };
        tally.take([holds(1, false, 528), None, holds(2, true, 100), holds(3, true, 10)].into_iter());
        assert_eq!(tally.held()[GpuSlot::FIRST], 110);
        assert_eq!(tally.processes().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(tally.ended().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn what_was_waited_is_never_forgotten_and_never_counted_twice() {
        let mut tally = Tally::default();
        let mut take = |slots: &[Option<ProcessUsage>]| {
            tally.take(slots.iter().copied());
            (tally.waited, tally.waits, tally.denied)
        };
        assert_eq!(take(&[said(1, 10, 5), said(2, 1, 0)]), (11, 11, 5));
        assert_eq!(take(&[said(1, 15, 5), said(2, 1, 0)]), (16, 16, 5));
        assert_eq!(take(&[None, said(2, 1, 0)]), (16, 16, 5), "gone");
        assert_eq!(take(&[said(3, 20, 1), said(2, 1, 0)]), (36, 36, 6), "another process in the slot");
        assert_eq!(take(&[said(3, 2, 1), said(2, 1, 0)]), (38, 38, 6), "another process of the same number");
        assert_eq!(take(&[said(9, u64::MAX, 0)]), (u64::MAX, u64::MAX, 6), "nonsense does not wrap");
    }
}
