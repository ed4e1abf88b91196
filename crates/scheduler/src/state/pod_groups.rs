//! PodGroup objects: the sizes of gangs whose pods do not state one.

use std::collections::{BTreeMap, BTreeSet};

use tessera_wire::foreign::pod_group::PodGroup;
use tessera_wire::tessera::gang::{GangKey, GangOrigin};

use super::{State, WatchEvent};

/// The PodGroups of all projects.
#[derive(Debug, Default)]
pub(super) struct PodGroups {
    by_gang: BTreeMap<GangKey, PodGroup>,
    /// Projects whose PodGroups are listed completely.
    listed: BTreeSet<GangOrigin>,
    /// Known objects that the current list of their project has not contained yet.
    unlisted: BTreeSet<GangKey>,
}

impl PodGroups {
    pub(super) fn get(&self, gang: &GangKey) -> Option<&PodGroup> {
        self.by_gang.get(gang)
    }

    /// Returns whether the API server would show the object of a gang, and it does not exist.
    fn lack(&self, gang: &GangKey) -> bool {
        self.listed.contains(&gang.origin) && !self.by_gang.contains_key(gang)
    }

    /// Applies an event and returns the gangs with a different object.
    fn handle(&mut self, origin: GangOrigin, event: WatchEvent<PodGroup>) -> Vec<GangKey> {
        match event {
            WatchEvent::Listing => {
                self.unlisted.retain(|gang| gang.origin != origin);
                let known: Vec<GangKey> = self.of(origin).cloned().collect();
                self.unlisted.extend(known);
                Vec::new()
            }
            WatchEvent::Set(group) => {
                let gang = group.gang.clone();
                self.unlisted.remove(&gang);
                let is_same = self.by_gang.get(&gang) == Some(&group);
                self.by_gang.insert(gang.clone(), group);
                if is_same { Vec::new() } else { vec![gang] }
            }
            WatchEvent::Gone(group) => self.remove(vec![group.gang]),
            WatchEvent::Listed => {
                self.listed.insert(origin);
                let gone: Vec<GangKey> =
                    self.unlisted.iter().filter(|gang| gang.origin == origin).cloned().collect();
                self.remove(gone)
            }
        }
    }

    /// Forgets the objects of a project that the API server no longer serves.
    fn withdraw(&mut self, origin: GangOrigin) -> Vec<GangKey> {
        self.listed.remove(&origin);
        let known = self.of(origin).cloned().collect();
        self.remove(known)
    }

    fn of(&self, origin: GangOrigin) -> impl Iterator<Item = &GangKey> {
        self.by_gang.keys().filter(move |gang| gang.origin == origin)
    }

    fn remove(&mut self, gone: Vec<GangKey>) -> Vec<GangKey> {
        for gang in &gone {
            self.by_gang.remove(gang);
            self.unlisted.remove(gang);
        }
        gone
    }
}

impl State {
    pub(super) fn handle_pod_group(&mut self, origin: GangOrigin, event: WatchEvent<PodGroup>) {
        let changed = self.pod_groups.handle(origin, event);
        self.resize_gangs(&changed);
    }

    pub(super) fn withdraw_pod_groups(&mut self, origin: GangOrigin) {
        let changed = self.pod_groups.withdraw(origin);
        self.resize_gangs(&changed);
    }

    /// Returns whether the pods of a gang wait because the object with its size does not exist.
    pub(crate) fn lacks_pod_group(&self, gang: &GangKey) -> bool {
        self.pod_groups.lack(gang) && self.gang_status(gang).is_none()
    }

    /// Gives back the reservations of gangs that are incomplete by their new size.
    fn resize_gangs(&mut self, changed: &[GangKey]) {
        for key in changed {
            if let Some(gang) = self.gangs.get_mut(key) {
                gang.no_room_at = None;
                self.cancel_if_incomplete(key);
            }
        }
    }
}
