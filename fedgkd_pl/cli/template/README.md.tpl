# my-project

Federated learning with a net, data and a method of your own, on fedgkd_pl. Commands are for this folder.

```sh
fedgkd-pl fit --import my_project --config config.yaml         # one run: seconds
fedgkd-pl compare study.yaml --import my_project               # beside FedAvg and FedGKD: a minute
fedgkd-pl compare study.yaml --import my_project --dry_run     # only check everything
pytest                                                         # your method against its equation
```

| edit | to have |
|---|---|
| `my_project/net.py` | your own net |
| `my_project/data.py` | your own arrays; CSV, images and other files need only `config.yaml` |
| `my_project/method.py` | your own loss, broadcast or server step |
| `config.yaml` | other settings of a run: rounds, clients, partition, optimizer |
| `study.yaml` | other methods, settings and seeds in the table |
| `tests/test_method.py` | the number that your equation gives, worked out by hand |

A flag changes a setting for one run, such as `--model.gamma 0.5`, `--data.partition.alpha 0.1` or `--rounds 50`. To see
more:

```sh
fedgkd-pl partition --import my_project --config config.yaml   # who would hold what
fedgkd-pl fit --import my_project --config config.yaml --print_config
fedgkd-pl fit --import my_project --resume runs/my-project/version_0 --rounds 40
fedgkd-pl report runs/my-project                               # needs no --import: nothing is trained
tensorboard --logdir runs
```

`runs/study/table.md` and `table.tex` are the table of the study, `runs/study/report.html` is a page with curves. Two seeds
show that everything works; to claim a lead, take three or more, which are then tested.

`compare` skips what is finished and resumes what was interrupted. It sees a change of settings, but not one of your code:
then give the study another `name` in `study.yaml`, or delete `runs/study`.

If your code raises an error within a client, the run says what, and `failures.csv` in its folder says where.

A class in a new file needs a line in `my_project/__init__.py`. A class that you rename has its name there, in `config.yaml`,
in `study.yaml` and in `tests/test_method.py`, too; each file is checked by itself, also where a later one names another
class. All hooks of a method, all sources of data, and how a
LightningModule takes the place of the net: docs/extending.md, docs/data.md and docs/modules.md of fedgkd_pl.
