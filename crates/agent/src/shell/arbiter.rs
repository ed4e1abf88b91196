//! The arbiter, on a thread of its own: hands out time windows on shared cards to the containers of the grant directories.
//!
//! A new agent begins with nothing: the windows are in the grants' files, and the containers hold themselves to their shares
//! until it is there.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

use tessera_arbiter::{
    Service,
    card::Used,
    power::{PowerFactor, PowerModel},
};
use tessera_limits::{futex, limits::uuid_bytes};
use tessera_node::gpus::Gpus;
use tokio_util::sync::CancellationToken;

/// How often the cards' energy counters are read, which takes milliseconds.
const SAMPLE: Duration = Duration::from_millis(500);

/// How often what the containers have had is told.
const TELL: Duration = Duration::from_secs(1);

/// The service asks to be called again no sooner than this, in nanoseconds, when nobody wants a card.
const QUIET: u64 = 50_000_000;

/// How long the arbiter then sleeps: well below the time after which it is taken for gone.
const IDLE: u64 = 150_000_000;

/// How often a measurement is asked for at most: the driver takes some milliseconds for one.
const HURRY: Duration = Duration::from_millis(20);

/// The arbiter's thread, as the rest of the agent knows it.
#[derive(Clone, Debug)]
pub(super) struct Arbiter {
    commands: mpsc::Sender<Command>,
    used: Arc<Mutex<UsedTime>>,
}

/// What containers have had of cards, by grant directory and card.
pub(super) type UsedTime = HashMap<(PathBuf, [u8; 16]), Used>;

enum Command {
    Add(PathBuf),
    Remove(PathBuf),
    /// Whom to tell of processes that wait until what they hold has been measured.
    OnUnsure(Box<dyn Fn() + Send>),
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

    /// Whom to tell when a process near its limit waits until what it holds has been measured.
    pub(super) fn on_unsure(&self, tell: impl Fn() + Send + 'static) {
        let _ended = self.commands.send(Command::OnUnsure(Box::new(tell)));
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
    let mut tell: Box<dyn Fn() + Send> = Box::new(|| {});
    let (mut told, mut hurried) = (Instant::now(), Instant::now());
    while !stop.is_cancelled() {
        let now = futex::now();
        let next = service.step(now);
        if hurried.elapsed() >= HURRY && service.unsure().next().is_some() {
            hurried = Instant::now();
            tell();
        }
        if told.elapsed() >= TELL {
            told = Instant::now();
            let all = service.all_used().map(|(folder, card, used)| ((folder.to_owned(), card), used));
            *used.lock().unwrap_or_else(PoisonError::into_inner) = all.collect();
        }
        loop {
            match inbox.try_recv() {
                Ok(Command::OnUnsure(other)) => tell = other,
                Ok(command) => obey(&mut service, &mut factors, command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        // Where nobody wants a card for now, whoever does will ring.
        service.wait(if next >= now + QUIET { now + IDLE } else { next });
    }
}

fn obey(service: &mut Service, factors: &mut HashMap<[u8; 16], PowerFactor>, command: Command) {
    match command {
        Command::Add(folder) => {
            service.remove(&folder);
            if let Err(error) = service.add(&folder) {
                tracing::warn!(folder = %folder.display(), %error, "this grant gets no time windows");
            }
        }
        Command::Remove(folder) => service.remove(&folder),
        Command::Energy { card, at, millijoules, watts } => {
            let factor =
                factors.entry(card).or_insert_with(|| PowerFactor::new(PowerModel::with_limit(watts)));
            if let Some(card) = service.card(&card) {
                card.set_factor(factor.sample(at, millijoules, card.busy()));
            }
        }
        Command::OnUnsure(_) => {}
    }
}
