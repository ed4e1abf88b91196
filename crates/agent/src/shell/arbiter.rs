//! The arbiter, on a thread of its own: hands out time windows on shared cards to the containers of the grant directories.
//!
//! A new agent begins with nothing: the windows are in the grants' files, and the containers hold themselves to their shares
//! until it is there.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use tessera_arbiter::{
    Service,
    card::Used,
    power::{PowerFactor, PowerModel},
    service::{Load, TICK},
};
use tessera_limits::{futex, limits::uuid_bytes};
use tessera_node::gpus::Gpus;
use tokio_util::sync::CancellationToken;

/// How often the card's energy counter is read: it moves about as often.
const SAMPLE: Duration = Duration::from_millis(100);

/// How often what the containers have had is told.
const TELL: Duration = Duration::from_secs(1);

/// The arbiter's thread, as the rest of the agent knows it.
#[derive(Clone, Debug)]
pub(super) struct Arbiter {
    commands: mpsc::Sender<Command>,
    used: Arc<Mutex<UsedTime>>,
}

/// What containers have had of cards, by grant directory and card.
pub(super) type UsedTime = HashMap<(PathBuf, [u8; 16]), Used>;

#[derive(Debug)]
enum Command {
    Add(PathBuf),
    Remove(PathBuf),
    /// A reading of a card's energy counter.
    Energy {
        card: [u8; 16],
        at: u64,
        millijoules: u64,
        watts: f64,
    },
}

impl Arbiter {
    pub(super) fn start(stop: CancellationToken) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let used = Arc::default();
        let arbiter = Self { commands, used: Arc::clone(&used) };
        thread::Builder::new().name("arbiter".into()).spawn(move || run(&inbox, &used, &stop))?;
        Ok(arbiter)
    }

    /// A container has, or will have, its grant there. One that starts again is another tenant.
    pub(super) fn add(&self, directory: PathBuf) {
        let _ended = self.commands.send(Command::Add(directory));
    }

    pub(super) fn remove(&self, directory: PathBuf) {
        let _ended = self.commands.send(Command::Remove(directory));
    }

    pub(super) fn used(&self) -> UsedTime {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the energy counters of all cards for as long as the agent runs: for shares of throughput. On another thread,
    /// as a driver that does not answer must not stop the windows.
    pub(super) fn sample_power(&self, gpus: Arc<dyn Gpus>, stop: CancellationToken) -> std::io::Result<()> {
        let commands = self.commands.clone();
        let sample = move || {
            while !stop.is_cancelled() {
                for (uuid, power) in gpus.power().unwrap_or_default() {
                    let Some(card) = uuid_bytes(&uuid.0) else { continue };
                    let (at, millijoules, watts) = (futex::now(), power.millijoules, power.limit_watts);
                    let _ended = commands.send(Command::Energy { card, at, millijoules, watts });
                }
                thread::sleep(SAMPLE);
            }
        };
        thread::Builder::new().name("power".into()).spawn(sample)?;
        Ok(())
    }
}

fn run(inbox: &mpsc::Receiver<Command>, used: &Mutex<UsedTime>, stop: &CancellationToken) {
    let mut service = Service::default();
    let mut factors: HashMap<[u8; 16], PowerFactor> = HashMap::new();
    let mut pace = Pace::default();
    let mut told = Instant::now();
    while !stop.is_cancelled() {
        let load = service.step(futex::now());
        if told.elapsed() >= TELL {
            told = Instant::now();
            let all =
                service.all_used().map(|(folder, card, used)| ((folder.to_owned(), card), used)).collect();
            *used.lock().unwrap_or_else(PoisonError::into_inner) = all;
        }
        match inbox.recv_timeout(pace.rest(load, Instant::now())) {
            Ok(Command::Add(folder)) => {
                service.remove(&folder);
                if let Err(error) = service.add(&folder) {
                    tracing::warn!(folder = %folder.display(), %error, "this grant gets no time windows");
                }
            }
            Ok(Command::Remove(folder)) => service.remove(&folder),
            Ok(Command::Energy { card, at, millijoules, watts }) => {
                let factor =
                    factors.entry(card).or_insert_with(|| PowerFactor::new(PowerModel::with_limit(watts)));
                if let Some(card) = service.card(&card) {
                    card.set_factor(factor.sample(at, millijoules, card.busy()));
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
}

/// How soon to look again: at once while anybody works, and ever later on a node where nobody does.
#[derive(Debug, Default)]
struct Pace {
    wanted: Option<Instant>,
}

/// A container that has just worked will soon work again.
const SOON: Duration = Duration::from_secs(1);
const LATELY: Duration = Duration::from_secs(10);

impl Pace {
    fn rest(&mut self, load: Load, now: Instant) -> Duration {
        if load == Load::Wanted {
            self.wanted = Some(now);
        }
        let quiet = self.wanted.map_or(Duration::MAX, |wanted| now - wanted);
        match load {
            _ if quiet < SOON => Duration::from_nanos(TICK),
            Load::Wanted | Load::Quiet if quiet < LATELY => Duration::from_millis(5),
            Load::Wanted | Load::Quiet => Duration::from_millis(20),
            // Well before a heartbeat is missed.
            Load::Empty => Duration::from_millis(100),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quieter_the_later() {
        let (mut pace, begin) = (Pace::default(), Instant::now());
        let mut rest = |load, seconds| pace.rest(load, begin + Duration::from_secs(seconds)).as_micros();
        assert_eq!(rest(Load::Empty, 0), 100_000);
        assert_eq!(rest(Load::Quiet, 1), 20_000);
        assert_eq!(rest(Load::Wanted, 2), 500);
        assert_eq!(rest(Load::Quiet, 2), 500);
        assert_eq!(rest(Load::Quiet, 4), 5_000);
        assert_eq!(rest(Load::Quiet, 30), 20_000);
        assert_eq!(rest(Load::Empty, 31), 100_000);
    }
}
