//! The arbiter over files: reads demands, writes windows.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tessera_limits::control::Control;
use tessera_limits::files::{self, Mapping};
use tessera_limits::ledger::Demands;
use tessera_limits::limits::Meaning;
use tessera_limits::{Limits, futex};

use crate::card::{Act, CardArbiter, Seen, Share, Used};

/// How often demands are looked at.
pub const TICK: u64 = 500_000;

/// All grants of a node, and the cards they share.
#[derive(Debug, Default)]
pub struct Service {
    tenants: HashMap<PathBuf, Tenant>,
    cards: HashMap<[u8; 16], CardArbiter<u64>>,
    next: u64,
}

/// One grant. The account is only ever read, never mapped: a container that cuts its file short would otherwise end us.
#[derive(Debug)]
struct Tenant {
    id: u64,
    control: Mapping<Control>,
    account: File,
    limits: Limits,
    turn: u64,
    demands: Demands,
}

/// How much there was to do in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Load {
    /// No process is there that could want a card.
    Empty,
    /// Nobody wants a card now.
    Quiet,
    /// Somebody does: look again after a [`TICK`].
    Wanted,
}

impl Service {
    /// Takes a grant in, by its folder.
    ///
    /// # Errors
    /// When its files cannot be used.
    pub fn add(&mut self, folder: &Path) -> io::Result<()> {
        let control = files::open_control_to_write(folder)?;
        let limits = control
            .read()
            .map_err(|damage| io::Error::new(io::ErrorKind::InvalidData, damage.to_string()))?;
        let account = File::open(files::account_path(folder))?;
        self.next += 1;
        let tenant = Tenant {
            id: self.next,
            turn: control.turn(),
            control,
            account,
            limits,
            demands: Demands::default(),
        };
        self.apply(&tenant);
        self.tenants.insert(folder.into(), tenant);
        Ok(())
    }

    /// A grant has ended.
    pub fn remove(&mut self, folder: &Path) {
        if let Some(tenant) = self.tenants.remove(folder) {
            self.cards.values_mut().for_each(|card| card.remove(tenant.id));
        }
    }

    /// What a grant has had of a card.
    #[must_use]
    pub fn used(&self, folder: &Path, uuid: &[u8; 16]) -> Used {
        let tenant = self.tenants.get(folder);
        let used = tenant.and_then(|tenant| Some(self.cards.get(uuid)?.used(tenant.id)));
        used.unwrap_or_default()
    }

    /// A card, for its busy time and power factor.
    pub fn card(&mut self, uuid: &[u8; 16]) -> Option<&mut CardArbiter<u64>> {
        self.cards.get_mut(uuid)
    }

    /// The cards of a grant, and what it has had of each.
    pub fn all_used(&self) -> impl Iterator<Item = (&Path, [u8; 16], Used)> {
        self.tenants.iter().flat_map(|(folder, tenant)| {
            let uuids = tenant.limits.cards.iter().map(|card| card.uuid);
            uuids.map(|uuid| (folder.as_path(), uuid, self.used(folder, &uuid)))
        })
    }

    /// Looks once at everything. Call it every [`TICK`] while somebody wants a card.
    pub fn step(&mut self, now: u64) -> Load {
        let (mut load, is_wanted) = (Load::Empty, Cell::new(false));
        for tenant in self.tenants.values_mut() {
            tenant.control.beat(now);
            tenant.demands.read(|bytes, place| tenant.account.read_at(bytes, place));
            if tenant.demands.has_processes() {
                load = Load::Quiet;
            }
            let turn = tenant.control.turn();
            if turn != tenant.turn
                && let Ok(limits) = tenant.control.read()
            {
                (tenant.turn, tenant.limits) = (turn, limits);
                for (uuid, share) in shares(&tenant.limits) {
                    self.cards.entry(uuid).or_default().set(tenant.id, share);
                }
            }
        }
        for (uuid, card) in &mut self.cards {
            let find = |id: u64| {
                let tenant = self.tenants.values().find(|tenant| tenant.id == id)?;
                Some((tenant, tenant.limits.card(uuid)?))
            };
            let acts = card.step(now, |id| {
                let Some((tenant, place)) = find(id) else { return Seen::default() };
                let number = tenant.control.window(place).number.load(std::sync::atomic::Ordering::Relaxed);
                let (wants, has_drained) = tenant.demands.of(place, number);
                if wants {
                    is_wanted.set(true);
                }
                Seen { wants, has_drained }
            });
            for act in acts {
                let (Act::Open { tenant: id, deadline } | Act::Move { tenant: id, deadline }) = act;
                let Some((tenant, place)) = find(id) else { continue };
                let window = tenant.control.window(place);
                match act {
                    Act::Open { .. } => {
                        window.open(deadline);
                    }
                    Act::Move { .. } => window.set_deadline(deadline),
                }
                futex::wake(&window.change);
            }
        }
        if is_wanted.get() { Load::Wanted } else { load }
    }

    fn apply(&mut self, tenant: &Tenant) {
        for (uuid, share) in shares(&tenant.limits) {
            self.cards.entry(uuid).or_default().set(tenant.id, share);
        }
    }
}

/// The share of each card.
fn shares(limits: &Limits) -> impl Iterator<Item = ([u8; 16], Share)> {
    let by_throughput = limits.meaning == Meaning::Throughput;
    limits
        .cards
        .iter()
        .map(move |card| (card.uuid, Share { cores: card.cores, ceiling: card.ceiling, by_throughput }))
}
