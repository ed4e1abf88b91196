// Command kubernetes is every server the end-to-end tests need, and helm, in one program. The first argument,
// or the name of the file, says which one to be.
// Nearly all packages are shared between them, so linking once is several times smaller and quicker than five programs.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	containerd "github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins"
	_ "k8s.io/component-base/logs/json/register"
)

// Each part reads os.Args as if it were a program of its own and returns its exit status.
var parts = map[string]func() int{
	"containerd":              func() int { return status(containerd.App().Run(os.Args)) },
	"ctr":                     func() int { return status(ctr.New().Run(os.Args)) },
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"helm":                    runHelm,
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllers.NewControllerManagerCommand()) },
	"kube-proxy":              func() int { return cli.Run(proxy.NewProxyCommand()) },
	"kube-scheduler":          func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kubelet":                 func() int { return cli.Run(kubelet.NewKubeletCommand(context.Background())) },
}

func main() {
	// In an image, the name of the file says it.
	if run, found := parts[filepath.Base(os.Args[0])]; found {
		os.Exit(run())
	}
	if len(os.Args) > 1 {
		if run, found := parts[os.Args[1]]; found {
			os.Args = os.Args[1:]
			os.Exit(run())
		}
	}
	fmt.Fprintf(os.Stderr, "usage: %s PART [FLAG...], where PART is one of %v\n", os.Args[0], slices.Sorted(maps.Keys(parts)))
	os.Exit(2)
}

func runHelm() int {
	// Without a name, the manager of fields would be the name of this program.
	kube.ManagedFieldsManager = "helm"
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err == nil {
		err = command.Execute()
	}
	// The command has printed an error of its own already.
	if err != nil {
		return 1
	}
	return 0
}

func status(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}
