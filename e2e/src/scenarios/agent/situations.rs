//! The situations every kubelet must bring the agent through, on a real one.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use tessera_sim::kubelet::situations::{self, Asked, Asking, Limit, Outcome, Role, Seen};
use tessera_wire::{dialect::MemoryUnit, grant};

use super::{
    books,
    pods::{Container, asking as manifest},
    stage::{SOON, Stage, core_node},
};

pub(super) async fn play_all(stage: &Stage) -> Result<()> {
    for situation in situations::all()? {
        situation.play(stage).await.map_err(|wrong| anyhow!("{}: {wrong}", situation.name))?;
        stage.harness.note(&situation.name);
    }
    Ok(())
}

fn container(asked: &Asked) -> Container {
    let resources: Vec<(&str, &str)> =
        asked.resources.iter().map(|(name, amount)| (name.as_str(), amount.as_str())).collect();
    match asked.role {
        Role::Init => Container::init(&asked.name, &resources),
        Role::Sidecar => Container::sidecar(&asked.name, &resources),
        Role::Main => Container::main(&asked.name, &resources),
    }
}

impl Stage {
    async fn became(&self, asking: &Asking) -> Result<Outcome> {
        let phase = if asking.refused.is_some() { "Failed" } else { "Running" };
        let pod = self.cluster.wait_for_phase(&asking.name, phase, SOON).await?;
        if phase == "Failed" {
            return Ok(Outcome::Refused(pod.status.and_then(|status| status.message).unwrap_or_default()));
        }
        self.wait_for_truth(&asking.name).await?;
        self.wait_until_handed_over(&asking.name).await?;
        let pod = self.pod(&asking.name).await?;
        let said = grant::parse(&pod.spec, &pod.metadata.annotations, &core_node()?, MemoryUnit::GiB)?;
        let said = said.context("no grant")?;
        let mut containers = BTreeMap::new();
        for asked in &asking.containers {
            let limits = self.limits_by_gpu(&pod.metadata.uid, &asked.name);
            let mut env = BTreeMap::new();
            if asked.role != Role::Init {
                let log = self.log(&asking.name, &asked.name).await?;
                let has_library = log.contains("control\n") && log.contains("/usr/lib/tessera/libtessera.so");
                ensure!(has_library == limits.is_some(), "limits {limits:?}, but it finds {log}");
                let pairs = log.lines().filter_map(|line| line.split_once('='));
                env = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            }
            let grant = said.iter().find(|grant| grant.container == asked.name);
            let seen = Seen {
                env,
                limits,
                said: grant.iter().flat_map(|grant| &grant.cards).map(|(card, _)| card.0).collect(),
            };
            containers.insert(asked.name.clone(), seen);
        }
        Ok(Outcome::Running(containers))
    }

    fn limits_by_gpu(&self, uid: &str, container: &str) -> Option<BTreeMap<u8, Limit>> {
        let cards = self.limits(uid, container).ok()?.cards;
        let limit = |card: &tessera_limits::GpuLimit| {
            Some((self.card(&card.uuid)?.0, Limit { mib: card.memory >> 20, percent: card.compute_percent }))
        };
        cards.iter().map(limit).collect()
    }
}

impl situations::Stage for Stage {
    fn uuid(&self, card: u8) -> String {
        self.uuid(card)
    }

    async fn make(&self, asking: &Asking) -> Result<(), String> {
        let containers: Vec<Container> = asking.containers.iter().map(container).collect();
        let mut pod = manifest(&asking.name, &containers);
        if let Some(spec) = pod.spec.as_mut().filter(|_| asking.is_unplaced()) {
            // It chose its node itself.
            spec.node_name = Some(self.node.name.clone());
        }
        self.create(pod).await.map(drop).map_err(in_words)
    }

    async fn bind(&self, asking: &Asking) -> Result<(), String> {
        if asking.is_unplaced() {
            return Ok(());
        }
        let granted: Vec<(&str, &[u8])> =
            asking.containers.iter().map(|asked| (asked.name.as_str(), asked.granted.as_slice())).collect();
        self.bind(&asking.name, &granted).await.map_err(in_words)
    }

    async fn outcome(&self, asking: &Asking) -> Result<Outcome, String> {
        self.became(asking).await.map_err(in_words)
    }

    async fn clear(&self) -> Result<(), String> {
        books::check(self).await.map_err(in_words)?;
        self.delete_all().await.map_err(in_words)
    }
}

fn in_words(error: anyhow::Error) -> String {
    format!("{error:#}")
}
