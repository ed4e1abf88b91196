//! The verbs answer only kube-scheduler, and certificates are renewed while pods are scheduled.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{CLIENT_SECRET, Replica, Site, pods::whole};

/// Secret with the certificate of the scheduler.
const SERVER_SECRET: &str = "tessera-scheduler-tls";

/// The scheduler checks its certificates once a minute.
const RENEWAL: Duration = Duration::from_secs(120);

/// The text `1` in Base64: a time of renewal that has passed long ago.
const LONG_AGO: &str = "MQ==";

pub(super) async fn run(site: &Site, replica: &Replica) -> Result<()> {
    anonymous_callers_are_refused(site, replica).await?;
    let before = (certificate(site, SERVER_SECRET).await?, certificate(site, CLIENT_SECRET).await?);
    let secrets: Api<Secret> = Api::namespaced(site.cluster.client(), "kube-system");
    for name in [SERVER_SECRET, CLIENT_SECRET] {
        let due = json!({ "data": { "renew-after": LONG_AGO } });
        secrets.patch(name, &PatchParams::default(), &Patch::Merge(&due)).await?;
    }
    let mut pods = 0;
    site.harness
        .wait_for("the certificates to be renewed", RENEWAL, async || {
            pods += 1;
            let name = format!("renewal-{pods}");
            site.make(&whole(&name, 1)).await?;
            site.bound(&name).await?;
            site.end(&name).await?;
            let after = (certificate(site, SERVER_SECRET).await?, certificate(site, CLIENT_SECRET).await?);
            Ok((before.0 != after.0 && before.1 != after.1).then_some(()))
        })
        .await?;
    site.harness.note(&format!("certificates were renewed while {pods} pods were scheduled"));
    Ok(())
}

async fn certificate(site: &Site, secret: &str) -> Result<Vec<u8>> {
    let data = site.secret(secret).await?.data.unwrap_or_default();
    let certificate = data.get("tls.crt").map(|value| value.0.clone()).unwrap_or_default();
    ensure!(!certificate.is_empty(), "Secret {secret} has no certificate");
    Ok(certificate)
}

/// A pod in the cluster can reach the verbs, but has no certificate.
async fn anonymous_callers_are_refused(site: &Site, replica: &Replica) -> Result<()> {
    let pod = whole("anonymous", 1);
    let pod = serde_json::to_string(&pod)?;
    for (what, address) in [("verbs", replica.addresses.verbs), ("dashboard", replica.addresses.pages)] {
        let body = format!(r#"{{"Pod":{pod},"NodeNames":["gib-1"]}}"#);
        let mut stream = TcpStream::connect(address).await?;
        let head = format!(
            "POST /scheduler/filter HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        let mut answer = Vec::new();
        let _reset = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        ensure!(!answer.starts_with("HTTP/1.1 200"), "{what} answered {answer}");
    }
    site.harness.note("a caller without a certificate gets no answer from the verbs");
    Ok(())
}
