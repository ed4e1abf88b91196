//! The four families of gpu-manager, labels by the alphabet as its client library writes them.

use tessera_wire::metrics::{Kind::Gauge, Labels, Page};

use crate::exporter::{
    ContainerSnapshot, ShareSnapshot, Snapshot,
    usage::{mebibytes, request},
};

pub(super) fn write(picture: &Snapshot, page: &mut Page) {
    let holders: Vec<&ContainerSnapshot> =
        picture.containers.iter().filter(|c| c.shares.iter().any(|share| share.hold.is_some())).collect();
    let used = |share: &ShareSnapshot| share.used.map(mebibytes);
    let busy = |share: &ShareSnapshot| share.busy.map(|busy| (busy * 1e4).round() / 100.0);
    by_gpu(picture, page, &holders, ("container_gpu_utilization", "gpu utilization", "gpu"), busy);
    by_gpu(
        picture,
        page,
        &holders,
        ("container_gpu_memory_total", "gpu memory usage in MiB", "gpu_memory"),
        used,
    );
    let mut compute_percent =
        page.family("container_request_gpu_utilization", Gauge, "request of gpu utilization");
    for container in &holders {
        compute_percent
            .sample(&request_labels(picture, container, "req_of_gpu"), request(picture, container).0);
    }
    let mut memory = page.family("container_request_gpu_memory", Gauge, "request of gpu memory in MiB");
    for container in &holders {
        memory
            .sample(&request_labels(picture, container, "req_of_gpu_memory"), request(picture, container).1);
    }
}

/// A value for each GPU, and their sum.
fn by_gpu(
    picture: &Snapshot,
    page: &mut Page,
    holders: &[&ContainerSnapshot],
    (name, help, label): (&str, &str, &str),
    value: impl Fn(&ShareSnapshot) -> Option<f64>,
) {
    let mut family = page.family(name, Gauge, help);
    for container in holders {
        let labels = |which: &str| {
            Labels::new(&[
                ("container_name", &container.key.container),
                (label, which),
                ("namespace", &container.namespace),
                ("node", &picture.node),
                ("pod_name", &container.pod),
            ])
        };
        for share in &container.shares {
            family.sample(&labels(&format!("gpu{}", share.card)), value(share));
        }
        let total: Option<f64> = container.shares.iter().map(&value).sum();
        family.sample(&labels("total"), total);
    }
}

fn request_labels(picture: &Snapshot, container: &ContainerSnapshot, label: &str) -> Labels {
    Labels::new(&[
        ("container_name", &container.key.container),
        ("namespace", &container.namespace),
        ("node", &picture.node),
        ("pod_name", &container.pod),
        (label, "total"),
    ])
}
