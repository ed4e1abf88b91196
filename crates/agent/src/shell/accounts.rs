//! The books that containers keep, read once a second on a thread of their own: what their processes hold, how long they waited,
//! what they were refused.

use std::{
    collections::BTreeMap,
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

use tessera_arbiter::card::Used;
use tessera_limits::{
    CARDS, Control,
    files::{self, Mapping},
    futex,
    ledger::{Demands, Ledger, Said},
    limits::uuid_text,
};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages, Sampler, arbiter::Arbiter};
use crate::{
    exporter::{ContainerKey, Throttle, Throttles},
    machine::{AccountRead, Event, Measured, Whose},
};

/// How often they are read.
const EVERY: Duration = Duration::from_secs(1);

/// The thread, as the rest of the agent knows it.
#[derive(Clone, Debug)]
pub(super) struct Accounts(mpsc::Sender<Command>);

#[derive(Debug)]
enum Command {
    Add(Whose, PathBuf),
    Remove(PathBuf),
    Unledgered {
        whose: Whose,
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
    control: Mapping<Control>,
    demands: Demands,
    tally: Tally,
}

/// What the processes of a container went through, so far. Only ever grows, though their slots are used again.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    waited: u64,
    waits: u64,
    denied: u64,
    before: Vec<Option<Said>>,
}

impl Accounts {
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
    pub(super) fn add(&self, whose: Whose, directory: PathBuf) {
        let _ended = self.0.send(Command::Add(whose, directory));
    }

    pub(super) fn remove(&self, directory: PathBuf) {
        let _ended = self.0.send(Command::Remove(directory));
    }

    pub(super) fn set_unledgered(&self, whose: Whose, card: usize, bytes: u64, at: u64) {
        let _ended = self.0.send(Command::Unledgered { whose, card, bytes, at });
    }
}

fn obey(accounts: &mut BTreeMap<Whose, Account>, command: Command) {
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
            if let Some(account) = accounts.get(&whose).filter(|_| card < CARDS) {
                account.control.set_unledgered(card, bytes, at);
            }
        }
        Command::Measure => {}
    }
}

fn measure(
    accounts: &mut BTreeMap<Whose, Account>,
    sampler: &Sampler,
    arbiter: &Arbiter,
    messages: &Messages,
) {
    let at = futex::now();
    let before: BTreeMap<Whose, Vec<u64>> =
        accounts.iter_mut().map(|(whose, account)| (whose.clone(), account.held())).collect();
    let (looked_at, processes) = sampler.on_cards();
    let used = arbiter.used();
    let mut throttles = Throttles::new();
    let mut read = Vec::new();
    for (whose, account) in accounts {
        let after = account.held();
        let before = before.get(whose).into_iter().flatten().chain(std::iter::repeat(&0));
        let held = after.iter().zip(before).map(|(after, before)| *after.max(before));
        let Ok(limits) = account.control.read() else { continue };
        for (place, card) in limits.cards.iter().enumerate() {
            let Used { time, windows } =
                used.all.get(&(account.directory.clone(), card.uuid)).copied().unwrap_or_default();
            let (uid, container) = whose.clone();
            let mut throttle = Throttle { open: seconds(time), windows, ..Throttle::default() };
            // Processes do not tell which card they waited for; shares are of one card.
            if place == 0 {
                let Tally { waited, waits, denied, .. } = &account.tally;
                throttle =
                    Throttle { seconds: seconds(*waited), waits: *waits, denied_bytes: *denied, ..throttle };
            }
            let gpu = uuid_text(&card.uuid).as_str().into();
            throttles.insert((ContainerKey { uid, container }, gpu), throttle);
        }
        let alive = account.tally.before.iter().flatten().filter(|said| said.is_alive);
        read.push(AccountRead {
            container: whose.clone(),
            processes: alive.map(|said| said.process).collect(),
            held: held.take(limits.cards.len()).collect(),
        });
    }
    sampler.report(throttles, Duration::from_nanos(futex::now().saturating_sub(used.at)));
    let measured = Measured { at, looked_at, processes, accounts: read };
    let _ended = messages.send(Message::Event(Event::Measured(Box::new(measured))));
}

fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

impl Account {
    fn open(directory: &Path) -> io::Result<Self> {
        let control = files::open_control_to_write(directory)?;
        let file = OpenOptions::new().read(true).write(true).open(files::account_path(directory))?;
        Ok(Self {
            directory: directory.to_owned(),
            file,
            control,
            demands: Demands::default(),
            tally: Tally::default(),
        })
    }

    /// Reads the books: bytes held of each card.
    fn held(&mut self) -> Vec<u64> {
        let size = size_of::<Ledger>() as u64;
        // The container can write what it likes, but not as much as it likes: the file is on the node's disk.
        if self.file.metadata().is_ok_and(|file| file.len() > size) {
            let _shorter = self.file.set_len(size);
        }
        self.demands.read(|bytes, place| self.file.read_at(bytes, place));
        self.tally.take(self.demands.said());
        let all = self.tally.before.iter().flatten();
        let sum = |card: usize| all.clone().fold(0, |sum: u64, said| sum.saturating_add(said.held[card]));
        (0..CARDS).map(sum).collect()
    }
}

impl Tally {
    fn take(&mut self, slots: impl Iterator<Item = Option<Said>>) {
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

    fn said(process: u32, waited: u64, denied: u64) -> Option<Said> {
        Some(Said { process, is_alive: true, waited, waits: waited, denied, ..Said::default() })
    }

    #[test]
    fn what_was_waited_is_never_forgotten_and_never_counted_twice() {
        let mut tally = Tally::default();
        let mut take = |slots: &[Option<Said>]| {
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
