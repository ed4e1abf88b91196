//! Every call of the kubelet is answered exactly once, whatever kubelet and pods send.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use proptest::prelude::*;
use serde_json::json;
use tessera_core::{gpu::Gpu, units::MiB};
use tessera_node::{
    device_plugin::PreferenceRequest,
    gpus::{DiscoveredGpus, Incident, IncidentKind},
    pod_resources::{ContainerDevices, PodDevices},
};
use tessera_wire::{
    foreign::{
        dialect::{Dialect, hami},
        objects::Pod,
    },
    kubelet::device_id::Resource,
    tessera::gpu_wishes,
};

use super::world::{found, settings};
use crate::controller::{Action, Agent, AgentSettings, CallId, Event, EventTime, ShellError, WriteError};

fn resource() -> impl Strategy<Value = Resource> {
    prop::sample::select(Resource::ALL.to_vec())
}

/// Device IDs of which some exist and some never did.
fn ids() -> impl Strategy<Value = Vec<String>> {
    let words = [
        "00000000-0",
        "00000000-1",
        "00000001-0",
        "00000003-99",
        "00000000-18446744073709551615",
        "-",
        "",
        "00000000-",
    ];
    let uuids =
        ["GPU-00000000-0000-4000-8000-000000000000", "GPU-00000002-0000-4000-8000-000000000000", "lost-1"];
    prop::collection::vec(prop::sample::select([&words[..], &uuids[..]].concat()), 0..4)
        .prop_map(|ids| ids.into_iter().map(str::to_owned).collect())
}

fn pod() -> impl Strategy<Value = Pod> {
    let amounts = ["0", "1", "2", "30", "100", "150", "18446744073709551615", "x"];
    let names: Vec<&str> = Resource::ALL.map(Resource::name).into_iter().chain(hami::PER_GPU).collect();
    let limits = move || {
        prop::collection::btree_map(
            prop::sample::select(names.clone()),
            prop::sample::select(amounts.to_vec()),
            0..3,
        )
    };
    let wishes = prop::collection::btree_map(
        prop::sample::select(gpu_wishes::KEYS.to_vec()),
        prop::sample::select(vec![
            "true",
            "spread,numa",
            "GPU-00000002-0000-4000-8000-000000000000",
            ",",
            "",
        ]),
        0..3,
    );
    let grant = prop::sample::select(vec![
        "{}",
        "x",
        r#"{"main":[{"uuid":"GPU-00000000-0000-4000-8000-000000000000","index":0,"compute_percent":4294967295,"memoryMiB":18446744073709551615}]}"#,
        r#"{"main":[{"uuid":"GPU-00000002-0000-4000-8000-000000000000","index":0,"compute_percent":100}],"init":[]}"#,
    ]);
    let phase = prop::sample::select(vec!["Pending", "Running", "Failed", ""]);
    let annotations = (prop::option::of(grant), wishes);
    (0..4u8, limits(), limits(), annotations, phase, any::<bool>()).prop_map(|(name, main, init, annotations, phase, started)| {
        let (grant, mut annotations): (_, BTreeMap<&str, &str>) = annotations;
        annotations.extend(grant.map(|grant| ("tessera.dev/grant", grant)));
        serde_json::from_value(json!({
            "metadata": { "name": format!("p{}", name % 3), "namespace": "team", "uid": format!("u{name}"), "annotations": annotations },
            "spec": {
                "nodeName": "node-1",
                "initContainers": [{ "name": "init", "resources": { "limits": init } }],
                "containers": [{ "name": "main", "resources": { "limits": main } }],
            },
            "status": { "phase": phase, "startTime": started.then_some("2026-11-15T05:00:00Z") },
        }))
        .unwrap()
    })
}

fn listed() -> impl Strategy<Value = Vec<PodDevices>> {
    let container = (
        prop::sample::select(vec!["main", "init", "other"]),
        prop::collection::btree_map(resource(), ids(), 0..3),
    )
        .prop_map(|(name, ids)| ContainerDevices {
            name: name.to_owned(),
            ids: ids
                .into_iter()
                .map(|(resource, ids)| (resource.name().to_owned(), ids.into_iter().collect()))
                .collect(),
            ..ContainerDevices::default()
        });
    let entry = (0..4u8, prop::collection::vec(container, 0..3)).prop_map(|(name, containers)| PodDevices {
        namespace: "team".to_owned(),
        name: format!("p{name}"),
        containers,
    });
    prop::collection::vec(entry, 0..5)
}

fn gpus() -> impl Strategy<Value = Result<DiscoveredGpus, ShellError>> {
    let change = |(position, uuid, memory): (usize, &str, u64)| {
        let mut all = found();
        let gpu = all.gpus[position].clone();
        all.gpus[position] = Gpu { uuid: uuid.into(), memory: MiB(memory), ..gpu };
        Ok(all)
    };
    let uuids = vec![
        "lost-1",
        "",
        "GPU-00000000-0000-4000-8000-000000000000",
        "GPU-00000000-ffff-4000-8000-000000000000",
    ];
    prop_oneof![
        Just(Ok(found())),
        Just(Err(ShellError::GpuDiscovery("no driver".to_owned()))),
        (0..4usize, prop::sample::select(uuids), prop::sample::select(vec![0, 1, 16_384, 1 << 22]))
            .prop_map(change),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let xid = (0..5u8, prop::sample::select(vec![13, 48, 79, 999])).prop_map(|(position, number)| Incident {
        gpu: found().gpus.get(usize::from(position)).map(|gpu| gpu.uuid.clone()),
        kind: IncidentKind::Xid(number),
    });
    let wish = (ids(), ids(), prop::sample::select(vec![0, 1, 2, 30, usize::MAX]))
        .prop_map(|(available, required, count)| PreferenceRequest { available, required, count });
    let set = || ids().prop_map(|ids| ids.into_iter().collect::<BTreeSet<String>>());
    prop_oneof![
        4 => pod().prop_map(|pod| Event::PodApplied(Box::new(pod))),
        1 => prop::collection::vec(pod(), 0..4).prop_map(Event::Pods),
        1 => (0..4u8).prop_map(|name| Event::PodDeleted(format!("u{name}").as_str().into())),
        6 => (resource(), wish).prop_map(|(resource, wish)| Event::Prefer(CallId(0), resource, wish)),
        6 => (resource(), set()).prop_map(|(resource, ids)| Event::Allocate(CallId(0), resource, ids)),
        6 => (resource(), set()).prop_map(|(resource, ids)| Event::PreStart(CallId(0), resource, ids)),
        2 => gpus().prop_map(Event::Gpus),
        1 => xid.prop_map(Event::Incident),
        1 => resource().prop_map(Event::StreamOpened),
        1 => resource().prop_map(|resource| Event::InstanceStreamOpened(resource.name().to_owned())),
        2 => Just(Event::Tick),
    ]
}

proptest! {
    #[test]
    fn every_call_is_answered_once(
        events in prop::collection::vec((event(), 0..2000u64), 1..30),
        lists in prop::collection::vec(listed(), 1..4),
        reads in prop::collection::vec(pod(), 0..4),
        dialects in prop::sample::select(vec![settings().dialects, Dialect::ALL.to_vec()]),
    ) {
        let mut agent = Agent::new(AgentSettings { dialects, ..settings() });
        let (mut elapsed, mut asked, mut answered) = (Duration::ZERO, 0, BTreeSet::new());
        let ticks = (0..100).map(|_| (Event::Tick, 100));
        for (event, pause) in events.into_iter().chain(ticks) {
            elapsed += Duration::from_millis(pause);
            let mut call = || {
                asked += 1;
                CallId(asked)
            };
            let mut queue = vec![match event {
                Event::Prefer(_, resource, wish) => Event::Prefer(call(), resource, wish),
                Event::Allocate(_, resource, ids) => Event::Allocate(call(), resource, ids),
                Event::PreStart(_, resource, ids) => Event::PreStart(call(), resource, ids),
                other => other,
            }];
            while let Some(event) = queue.pop() {
                for action in agent.handle(EventTime { elapsed, unix_nanos: 17 }, event) {
                    let list = || lists[usize::try_from(asked).unwrap() % lists.len()].clone();
                    match action {
                        Action::Answer(call, _) => prop_assert!(answered.insert(call), "{call:?} is answered twice"),
                        Action::ListPodResources => queue.push(Event::PodResourcesListed(Ok(list()))),
                        Action::ReadPods => queue.push(Event::PodsRead(Ok(reads.clone()))),
                        Action::CreateGrants(call, _) => queue.push(Event::GrantsCreated(call, Ok(()))),
                        Action::UpdateGrant(limits) => queue.push(Event::GrantUpdated(limits, Ok(()))),
                        Action::PatchPod { uid, .. } => queue.push(Event::PodPatched(uid, Err(WriteError::Later("busy".into())))),
                        _ => {}
                    }
                }
            }
            let _view = agent.view();
        }
        prop_assert_eq!(answered.len(), usize::try_from(asked).unwrap(), "every call is answered in the end");
    }
}
