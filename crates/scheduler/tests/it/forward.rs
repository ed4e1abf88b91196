//! Replicas that wait forward the calls of kube-scheduler to the leader, so that all replicas are ready.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tessera_scheduler::certificates::OwnCertificates;
use tessera_scheduler::certificates::plan::{Pem, SERVER_NAME, Stored, renew};
use tessera_scheduler::dashboard::AgentReader;
use tessera_scheduler::run::Membership;
use tessera_scheduler::server::{CallSender, VERBS, serve_all};
use tessera_serve::{Tls, TlsPem};
use tessera_sim::apiserver::ApiServer;
use tokio::net::TcpListener;

use crate::fixtures::whole;
use crate::server::{Replica, cluster, eventually, make};

const CLIENT: &str = "tessera-kube-scheduler";

fn pem(pem: &Option<Pem>) -> TlsPem {
    let Pem { certificate, key, authority, .. } = pem.clone().unwrap();
    TlsPem { certificate, key, authority }
}

/// Starts a replica that serves the verbs with these certificates, and forwards calls.
async fn start(api: &ApiServer, name: &str, certificates: &Stored) -> Replica {
    let tls = Tls::for_client(pem(&certificates.server), CLIENT).unwrap();
    start_with(api, name, tls, CallSender::new(&pem(&certificates.client)).unwrap()).await
}

async fn start_with(api: &ApiServer, name: &str, tls: Tls, sender: CallSender) -> Replica {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (identity, verbs) = (name.to_owned(), listener.local_addr().ok());
    let membership = |membership| Membership { identity, verbs, is_behind_service: true, ..membership };
    let replica = Replica::with(api, AgentReader::default(), membership);
    replica.app.forward_calls(sender);
    tokio::spawn(serve_all(vec![(listener, replica.router.clone(), VERBS, Some(tls))]));
    replica
}

#[tokio::test]
async fn any_replica_answers_calls_before_during_and_after_a_change_of_the_leader() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let certificates = renew(&Stored::default(), CLIENT, now).unwrap();
    let api = cluster().await;
    let mut first = start(&api, "first", &certificates).await;
    eventually(|| first.app.is_ready()).await;
    let second = start(&api, "second", &certificates).await;
    eventually(|| second.app.leadership.follows()).await;
    assert!(!second.app.is_ready(), "it does not lead");
    assert_eq!(second.get("/readyz").await.0, 200, "it forwards calls, so it is ready");

    assert_eq!(second.bind(&make(&api, &whole("before", 1)), "a").await, "");
    let node_of = |pod: &str| {
        let pod = api.get(&format!("/api/v1/namespaces/team/pods/{pod}")).unwrap();
        pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(node_of("before"), "a");
    assert_eq!(second.app.read().unconfirmed(), 0, "the leader has booked it");

    // The first replica ends in an orderly way. A call waits for the new leader.
    drop(first.stop.take());
    eventually(|| !first.app.is_ready()).await;
    assert_eq!(second.bind(&make(&api, &whole("during", 1)), "a").await, "");
    assert!(second.app.is_ready() && node_of("during") == "a");

    // Clients that do not know of its end yet still reach the first one.
    assert_eq!(first.bind(&make(&api, &whole("after", 1)), "b").await, "");
    assert_eq!(node_of("after"), "b");
    assert!(second.app.read().ledger().overbooked().is_empty());
}

#[tokio::test]
async fn a_replica_without_a_way_to_the_leader_is_not_ready() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let certificates = renew(&Stored::default(), CLIENT, now).unwrap();
    let api = cluster().await;
    // An older version publishes no address of its verbs.
    let older = Replica::ready(&api, "older").await;
    let newer = start(&api, "newer", &certificates).await;
    assert_eq!(newer.get("/readyz").await.0, 503);
    older.task.abort();
    eventually(|| newer.app.is_ready()).await;
    assert_eq!(newer.get("/readyz").await.0, 200);
}

/// Writes a certificate for these names and usages with its authority, as cert-manager mounts it.
fn own_certificates(folder: &Path, names: &[&str], usages: Vec<ExtendedKeyUsagePurpose>) -> OwnCertificates {
    let (authority_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = authority.self_signed(&authority_key).unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.extended_key_usages = usages;
    let certificate = params.signed_by(&key, &Issuer::new(authority, authority_key)).unwrap();
    let write = |name: &str, text: String| {
        std::fs::write(folder.join(name), text).unwrap();
        folder.join(name)
    };
    OwnCertificates {
        certificate: write("tls.crt", certificate.pem()),
        key: write("tls.key", key.serialize_pem()),
        authority: write("ca.crt", root.pem()),
        client_name: CLIENT.to_owned(),
    }
}

#[tokio::test]
async fn replicas_forward_calls_with_a_certificate_of_the_user() {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let folder = tempfile::tempdir().unwrap();
    let files = own_certificates(folder.path(), &[SERVER_NAME, CLIENT], vec![ServerAuth, ClientAuth]);
    let api = cluster().await;
    let of = |files: &OwnCertificates| {
        let (tls, sender) = files.clone().follow().unwrap();
        (tls, sender.unwrap())
    };
    let (tls, sender) = of(&files);
    let first = start_with(&api, "first", tls, sender).await;
    eventually(|| first.app.is_ready()).await;
    let (tls, sender) = of(&files);
    let second = start_with(&api, "second", tls, sender).await;
    eventually(|| second.app.leadership.follows()).await;
    assert_eq!(second.get("/readyz").await.0, 200);
    assert_eq!(second.bind(&make(&api, &whole("forwarded", 1)), "a").await, "");
    assert!(!second.app.is_ready(), "the first one has answered");
}

/// A certificate for the server alone serves kube-scheduler as before, and no replica forwards.
#[tokio::test]
async fn a_certificate_for_the_server_alone_does_not_forward() {
    let folder = tempfile::tempdir().unwrap();
    let usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let files = own_certificates(folder.path(), &[SERVER_NAME], usages);
    let (tls, sender) = files.follow().unwrap();
    assert!(tls.checks_clients() && sender.is_none());
}
