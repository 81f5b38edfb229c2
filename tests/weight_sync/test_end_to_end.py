from tests.weight_sync.cluster import *
def test_e2e():
    with running_cluster() as c:
        a=c.start("receiver.0"); b=c.start("receiver.1")
        c.wait_for_members("receiver.0","receiver.1")
        h=c.handoff()
        for n in range(1,6):
            assert h.publish(PolicyVersion(n,n-1), model(n))
            t=time.time()
            assert load(a,n-1).number==n
            assert load(b,n-1).number==n
            print(n,time.time()-t)
        print(c.coordinator.status()); print(c.publisher.status()); print(a.status())
