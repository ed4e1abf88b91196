//! The listeners of `tessera scheduler` and their flags.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use axum::Router;
use clap::Args;
use tessera_scheduler::certificates::{Certificates, OwnCertificates};
use tessera_scheduler::dashboard::login::Login;
use tessera_scheduler::server::{self, App};
use tessera_serve::{ConnectionLimits, Tls, TlsFiles};
use tokio::net::TcpListener;

use crate::values::{Listen, ValueError};
use crate::{host, values};

/// Port of the verbs, on all addresses.
const DEFAULT_VERBS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 12345);

const HEADING: &str = "Listeners";

#[derive(Debug, Args)]
pub(super) struct ListenArguments {
    /// Address of the verbs that kube-scheduler calls, with mutual TLS; may be given several times
    /// [default: :12345 if there is a certificate]
    #[arg(long, value_name = "ADDRESS", value_parser = values::address, help_heading = HEADING)]
    listen: Vec<SocketAddr>,

    /// Port of the verbs on 127.0.0.1, with plain HTTP, for a kube-scheduler in the same pod; no other pod can
    /// reach it (deploy/scheduler-second)
    #[arg(long, value_name = "PORT", conflicts_with = "listen", value_parser = loopback_port, help_heading = HEADING)]
    verbs_on_loopback: Option<u16>,

    /// IP addresses of pod and node, which are equal if the pod shares the network of its node
    #[arg(long, value_name = "IP", env = "POD_IP", hide = true)]
    pod_ip: Option<IpAddr>,

    #[arg(long, value_name = "IP", env = "HOST_IP", hide = true)]
    host_ip: Option<IpAddr>,

    /// Certificate of the verbs; read again when the file changes
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "client_ca"], help_heading = HEADING)]
    tls_cert: Option<PathBuf>,

    /// Key of the certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = HEADING)]
    tls_key: Option<PathBuf>,

    /// Certificate of the authority that signs kube-scheduler's certificate; read again when the
    /// file changes
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = HEADING)]
    client_ca: Option<PathBuf>,

    /// Keep the certificates in Secrets of this namespace: make them, renew them before they expire,
    /// and use them; deploy/scheduler creates the Secrets
    #[arg(long, value_name = "NAMESPACE", conflicts_with = "tls_cert", help_heading = HEADING)]
    certificates_in: Option<String>,

    /// DNS name in kube-scheduler's certificate
    #[arg(long, value_name = "NAME", default_value = "tessera-kube-scheduler", help_heading = HEADING)]
    client_name: String,

    /// Address of the dashboard, the API for reading and /metrics; "off" for none
    #[arg(long, value_name = "ADDRESS", default_value = ":12346", help_heading = HEADING)]
    dashboard_listen: Listen,

    /// Who may read the dashboard, the API and /metrics
    #[arg(long, value_name = "WHO", value_enum, default_value = "open", help_heading = HEADING)]
    pages_access: PagesReaders,

    /// Further host name under which browsers reach the dashboard; may be given several times
    #[arg(long, value_name = "NAME", help_heading = HEADING)]
    dashboard_host: Vec<String>,

    /// Address of /healthz and /readyz; "off" for none
    #[arg(long, value_name = "ADDRESS", default_value = ":12347", help_heading = HEADING)]
    health_listen: Listen,

    /// Address of the admission webhook at /admit/pods, by HTTPS: pods that request GPUs, or use claims with --dra,
    /// and name no scheduler get schedulerName tessera
    #[arg(long, value_name = "ADDRESS", value_parser = values::address, requires_all = ["webhook_cert", "webhook_key"], help_heading = HEADING)]
    webhook_listen: Option<SocketAddr>,

    /// Certificate of the webhook; read again when the file changes
    #[arg(long, value_name = "FILE", requires = "webhook_listen", help_heading = HEADING)]
    webhook_cert: Option<PathBuf>,

    /// Key of the webhook's certificate
    #[arg(long, value_name = "FILE", requires = "webhook_listen", help_heading = HEADING)]
    webhook_key: Option<PathBuf>,

    /// Address that serves everything with plain HTTP, for tests and during a migration. EVERY
    /// CLIENT THAT REACHES IT CAN BIND PODS TO NODES; may be given several times
    #[arg(long, value_name = "ADDRESS", value_parser = values::address, help_heading = HEADING)]
    insecure_listen: Vec<SocketAddr>,

    /// One more address of --insecure-listen; gpu-admission's flag, of which the last value counts
    #[arg(long, value_name = "ADDRESS", value_parser = values::address, hide = true)]
    address: Option<SocketAddr>,

    /// Largest accepted request body, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 32)]
    max_body: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PagesReaders {
    /// Every client that reaches the address, by plain HTTP
    Open,
    /// Callers with a token of Kubernetes and the ClusterRole tessera-dashboard-reader, by HTTPS with the
    /// certificate of the verbs
    Authenticated,
}

/// Parses a port and rejects addresses.
fn loopback_port(text: &str) -> Result<u16, ValueError> {
    text.parse().ok().filter(|port| *port > 0).ok_or(ValueError::LoopbackPort)
}

type Served = (TcpListener, Router, ConnectionLimits, Option<Tls>);

impl ListenArguments {
    fn has_certificates(&self) -> bool {
        self.tls_cert.is_some() || self.certificates_in.is_some()
    }

    /// Returns the addresses that serve everything with plain HTTP.
    fn plain(&self) -> impl Iterator<Item = SocketAddr> {
        self.insecure_listen.iter().copied().chain(self.address)
    }

    /// Checks that kube-scheduler can reach the verbs in some way.
    pub(super) fn check(&self) -> Result<()> {
        let has_certificates = self.has_certificates();
        if self.pages_access == PagesReaders::Authenticated {
            let dashboard = self.dashboard_listen.0.filter(|_| !has_certificates);
            let plain = dashboard.into_iter().chain(self.plain()).find(|address| !address.ip().is_loopback());
            if let Some(address) = plain {
                bail!(
                    "--pages-access authenticated: tokens must not travel over plain HTTP to {address}; write \
                     --certificates-in or --tls-cert for the dashboard, or listen on 127.0.0.1"
                );
            }
        }
        if self.verbs_on_loopback.is_some() {
            return self.check_own_network();
        }
        if has_certificates || (self.listen.is_empty() && self.plain().next().is_some()) {
            return Ok(());
        }
        bail!(
            "the verbs need certificates: write --certificates-in kube-system to keep them in Secrets, --tls-cert, \
             --tls-key and --client-ca for files, or --insecure-listen 127.0.0.1:12345 for a test on this host; in the \
             place of an extender of gputopology or gpushare, --insecure-listen :PORT serves plain HTTP as that one did, \
             until kube-scheduler has a certificate (docs/migration.md)"
        )
    }

    /// Returns the address at which other replicas reach the pages, unless those need a login.
    pub(super) fn forwarded_pages(&self) -> Option<SocketAddr> {
        let dashboard = self.dashboard_listen.0.filter(|_| self.pages_access == PagesReaders::Open)?;
        Some(SocketAddr::new(self.pod_ip?, dashboard.port()))
    }

    /// Returns the address at which other replicas reach the verbs, with certificates.
    pub(super) fn forwarded_verbs(&self) -> Option<SocketAddr> {
        if self.verbs_on_loopback.is_some() || !self.has_certificates() {
            return None;
        }
        let port = self.listen.first().map_or(DEFAULT_VERBS.port(), SocketAddr::port);
        Some(SocketAddr::new(self.pod_ip?, port))
    }

    /// Returns whether the replica runs in a pod, which clients reach by a Service.
    pub(super) fn is_behind_service(&self) -> bool {
        self.pod_ip.is_some()
    }

    /// Checks that the pod's loopback interface is its own.
    fn check_own_network(&self) -> Result<()> {
        match (self.pod_ip, self.host_ip) {
            (Some(pod), Some(host)) if pod == host => bail!(
                "--verbs-on-loopback: this pod has the address {host} of its node (hostNetwork), so every program of \
                 the node could bind pods; give the pod a network of its own, or use --listen with certificates"
            ),
            (Some(_), Some(_)) => Ok(()),
            _ => bail!(
                "--verbs-on-loopback needs the addresses of the pod and its node, to see that the pod has a network of \
                 its own: set the environment variables POD_IP and HOST_IP from status.podIP and status.hostIP, as \
                 deploy/scheduler-second does"
            ),
        }
    }

    /// Opens all listeners of a scheduler in this namespace.
    pub(super) async fn open(self, app: &Arc<App>, namespace: &str) -> Result<Vec<Served>> {
        let tls = self.tls(app).await?;
        tls.iter().for_each(|tls| app.metrics.set_certificates("verbs", tls.clone()));
        let body_limit = self.max_body << 20;
        let names = [&server::service_names(namespace)[..], &self.dashboard_host].concat();
        let has_login = self.pages_access == PagesReaders::Authenticated;
        let login = |is_secure| has_login.then(|| Login::new(app.client.clone(), is_secure));
        let mut served = Vec::new();
        let plain: Vec<SocketAddr> = self.plain().collect();
        if let Some(port) = self.verbs_on_loopback {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let (listener, address) = host::listen(address, "--verbs-on-loopback").await?;
            tracing::info!(url = %format_args!("http://{address}/"), "listening for the kube-scheduler of this pod");
            served.push((listener, server::verbs(Arc::clone(app), body_limit), server::VERBS, None));
        }
        let has_default = self.listen.is_empty() && self.verbs_on_loopback.is_none() && tls.is_some();
        let verbs = if has_default { vec![DEFAULT_VERBS] } else { self.listen };
        for address in verbs {
            let (listener, address) = host::listen(address, "--listen").await?;
            tracing::info!(url = %format_args!("https://{address}/"), "listening for kube-scheduler");
            served.push((listener, server::verbs(Arc::clone(app), body_limit), server::VERBS, tls.clone()));
        }
        if let Some(address) = self.dashboard_listen.0 {
            let (listener, address) = host::listen(address, "--dashboard-listen").await?;
            let tls = tls.as_ref().filter(|_| has_login).map(Tls::without_client_check);
            let scheme = if tls.is_some() { "https" } else { "http" };
            tracing::info!(url = %format_args!("{scheme}://{address}/"), "serving the dashboard");
            let router = server::pages(Arc::clone(app), body_limit, &names, login(tls.is_some()));
            served.push((listener, router, server::PAGES, tls));
        }
        if let Some(address) = self.health_listen.0 {
            let (listener, address) = host::listen(address, "--health-listen").await?;
            tracing::info!(url = %format_args!("http://{address}/"), "answering probes");
            served.push((listener, server::probes(Arc::clone(app)), server::PROBES, None));
        }
        if let (Some(address), Some(certificate), Some(key)) =
            (self.webhook_listen, self.webhook_cert, self.webhook_key)
        {
            let name = certificate.display().to_string();
            let tls = Tls::follow(TlsFiles { certificate, key, clients: None }).context(name)?;
            app.metrics.set_certificates("webhook", tls.clone());
            let (listener, address) = host::listen(address, "--webhook-listen").await?;
            tracing::info!(url = %format_args!("https://{address}/admit/pods"), "listening for the API server");
            served.push((listener, server::webhook(Arc::clone(app)), server::WEBHOOK, Some(tls)));
        }
        for address in plain {
            let (listener, address) = host::listen(address, "--insecure-listen").await?;
            tracing::info!(url = %format_args!("http://{address}/"), "listening");
            if !address.ip().is_loopback() {
                tracing::warn!(
                    %address,
                    "EVERY CLIENT THAT REACHES THIS ADDRESS CAN BIND PODS TO NODES; use --listen with certificates"
                );
            }
            let router = server::router(Arc::clone(app), body_limit, &names, login(false));
            served.push((listener, router, server::ALL, None));
        }
        Ok(served)
    }

    async fn tls(&self, app: &App) -> Result<Option<Tls>> {
        if let Some(namespace) = &self.certificates_in {
            let certificates = Certificates::of(app.client.clone(), namespace, &self.client_name);
            let (tls, sender) = certificates.follow().await.context("--certificates-in")?;
            if self.forwarded_verbs().is_some() {
                app.forward_calls(sender);
            }
            return Ok(Some(tls));
        }
        let (Some(certificate), Some(key), Some(authority)) =
            (&self.tls_cert, &self.tls_key, &self.client_ca)
        else {
            return Ok(None);
        };
        let files = OwnCertificates {
            certificate: certificate.clone(),
            key: key.clone(),
            authority: authority.clone(),
            client_name: self.client_name.clone(),
        };
        let (tls, sender) = files.follow().with_context(|| certificate.display().to_string())?;
        if let Some(sender) = sender.filter(|_| self.forwarded_verbs().is_some()) {
            app.forward_calls(sender);
        }
        Ok(Some(tls))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        listen: ListenArguments,
    }

    /// A follower would send the tokens of its readers to the leader.
    #[test]
    fn pages_with_a_login_are_not_published_for_forwarding() {
        let forwarded = |access: &str| {
            let flags = ["scheduler", "--pod-ip", "10.1.0.5", "--pages-access", access];
            Flags::parse_from(flags).listen.forwarded_pages()
        };
        assert_eq!(forwarded("open"), Some("10.1.0.5:12346".parse().unwrap()));
        assert_eq!(forwarded("authenticated"), None);
    }

    #[test]
    fn verbs_are_published_for_forwarding_with_certificates_from_anywhere() {
        let forwarded = |flags: &[&str]| {
            let flags = [&["scheduler", "--pod-ip", "10.1.0.5"], flags].concat();
            Flags::parse_from(flags).listen.forwarded_verbs().map(|address| address.to_string())
        };
        let verbs = Some("10.1.0.5:12345".to_owned());
        assert_eq!(forwarded(&["--certificates-in=a"]), verbs);
        assert_eq!(forwarded(&["--tls-cert=a", "--tls-key=b", "--client-ca=c"]), verbs);
        assert_eq!(forwarded(&["--insecure-listen=:1"]), None);
        assert_eq!(forwarded(&["--certificates-in=a", "--verbs-on-loopback=1"]), None);
    }
}
